"""/v1/batches: many requests from a file, answered into files with the capacity that others leave."""

import time

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from weft.server.apis.batches.file_routes import BatchBody, find_file
from weft.server.apis.batches.lines import ENDPOINTS, KIND, WINDOW_S, batch_json, batch_row, new_batch
from weft.server.apis.openai.pages import list_answer, read_page
from weft.server.errors import InvalidRequestError, NotFoundError, shown
from weft.server.http.auth import tenant_of
from weft.server.http.context import Context
from weft.server.store.transaction import Row, Transaction
from weft.server.task.body import BodyRoute
from weft.server.task.validation import ignored_fields, ignored_header

MAX_METADATA = 16
router = APIRouter()
body_router = APIRouter(route_class=BodyRoute)


@body_router.post("/v1/batches")
async def create_batch(body: BatchBody, request: Request, context: Context) -> Response:
    """Begin a batch."""
    ignored = ignored_fields(body.model_copy(update={"metadata": None}), {}, strict=context.settings.strict_params)
    await context.meet_engines()
    infos = [
        model.engine_client.info for model in context.models.values()
    ]  # None while it loads: its task is not known
    endpoints = [each for each, tasks in ENDPOINTS.items() if any(not info or info.task in tasks for info in infos)]
    if body.endpoint not in endpoints:
        message = f"endpoint must be one of {', '.join(endpoints)} for this server, got {shown(body.endpoint)}"
        raise InvalidRequestError(message, param="endpoint")
    _check_metadata(body.metadata or {})
    file = await find_file(body.input_file_id, request, context, "input_file_id")
    if msgspec.json.decode(file.data)["purpose"] != "batch":
        raise InvalidRequestError("input_file_id must be a file with the purpose batch", param="input_file_id")
    seconds = body.output_expires_after.seconds if body.output_expires_after else None
    batch = new_batch(body.endpoint, file.id, WINDOW_S, metadata=body.metadata, output_seconds=seconds)
    row = batch_row(batch, tenant_of(request))
    await context.store.write(lambda transaction: transaction.put(row))
    return Response(batch_json(row), headers=ignored_header(ignored), media_type="application/json")


@router.get("/v1/batches")
async def list_batches(request: Request, context: Context) -> Response:
    """The batches of this API key."""
    page, tenant = read_page(request, max_limit=100, default_limit=20), tenant_of(request)
    rows = await context.store.read(
        lambda transaction: transaction.page(KIND, tenant, after=page.after, limit=page.limit + 1, order=page.order)
    )
    return list_answer(rows, page, batch_json)


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(batch_id: str, request: Request, context: Context) -> Response:
    """One batch."""
    tenant = tenant_of(request)
    row = await context.store.read(lambda transaction: _find(transaction, batch_id, tenant))
    return Response(batch_json(row), media_type="application/json")


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, request: Request, context: Context) -> Response:
    """End a batch early; what is done stays."""
    tenant = tenant_of(request)

    def cancel(transaction: Transaction) -> Row:
        batch = msgspec.json.decode(_find(transaction, batch_id, tenant).data)
        if batch["status"] not in ("validating", "in_progress", "cancelling"):
            raise InvalidRequestError(f"the batch cannot be cancelled: it is {batch['status']}", param="batch_id")
        now = int(time.time())
        if batch["status"] == "validating":
            batch |= {"status": "cancelled", "cancelling_at": now, "cancelled_at": now}
        else:
            batch |= {"status": "cancelling", "cancelling_at": batch["cancelling_at"] or now}
        row = batch_row(batch, tenant)
        transaction.put(row)
        return row

    return Response(batch_json(await context.store.write(cancel, may_exceed=True)), media_type="application/json")


def _find(transaction: Transaction, batch_id: str, tenant: str) -> Row:
    row = transaction.get(KIND, batch_id, tenant)
    if row is None:
        raise NotFoundError(f"no such batch: {shown(batch_id)}", param="batch_id")
    return row


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        message = f"metadata must have at most {MAX_METADATA} members, got {len(metadata)}"
        raise InvalidRequestError(message, param="metadata")
    for name, value in metadata.items():
        if len(name) > 64 or len(value) > 512:
            message = f"metadata: keys must have at most 64 characters and values at most 512, got {shown(name)}"
            raise InvalidRequestError(message, param="metadata")


router.include_router(body_router)
