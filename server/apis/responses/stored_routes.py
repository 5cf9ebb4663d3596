"""The routes of /v1/responses beside creation: stored responses with their input items, and compaction.

Compaction turns a conversation into the user's messages and a sealed summary that the model writes. The summary is one
more answer of the generation pipeline, to a fixed instruction behind the items. It comes back as an item `compaction`
of an input, and stands there as a message of the assistant.
"""

import secrets
import time
from dataclasses import replace
from itertools import islice

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from weft.server.apis.openai.pages import json_answer, read_page
from weft.server.apis.responses.answers import CompactedResponse, CompactionItem
from weft.server.apis.responses.background import followed
from weft.server.apis.responses.input import InputItem, input_items
from weft.server.apis.responses.options import ACCEPTED, REFUSED_IN_COMPACT, read_include, with_included
from weft.server.apis.responses.render import usage_of
from weft.server.apis.responses.route import read_chat
from weft.server.apis.responses.schema import CompactBody, ReasoningOptions, ResponseBody, ResponseItem
from weft.server.apis.responses.sealing import Sealer
from weft.server.apis.responses.stored import RESPONSE, id_of, item_id, items_to_store, load_response, stored_input
from weft.server.apis.responses.stored import cancel as mark_cancelled
from weft.server.errors import InternalError, InvalidRequestError, NotFoundError, shown
from weft.server.generate.pipeline import complete
from weft.server.http.auth import tenant_of
from weft.server.http.context import Context, ServerContext
from weft.server.store.transaction import Transaction
from weft.server.task.body import BodyRoute
from weft.server.task.read_body import read_task
from weft.server.task.validation import ignored_header

router = APIRouter()
body_router = APIRouter(route_class=BodyRoute)
"""Of the route that takes JSON, which `BodyRoute` reads; the others take nothing. `router` includes it."""

MAX_PAGE = 100
MAX_SUMMARY_TOKENS = 1024
INSTRUCTION = (
    "Summarise the conversation so far, so that it can be continued from your summary alone. Keep the facts, names, "
    "numbers, decisions, results of tools and open questions. Write only the summary."
)


@router.get("/v1/responses/{response_id}")
async def retrieve(response_id: str, request: Request, context: Context) -> Response:
    """The response as it is now, or the events of one that was made in the background."""
    query, tenant = request.query_params, tenant_of(request)
    is_stream = _flag(query.get("stream"), "stream")
    after = _number(query.get("starting_after"), "starting_after", -1)
    if "starting_after" in query and not is_stream:
        raise InvalidRequestError("starting_after is only allowed when stream is true", param="starting_after")
    if _flag(query.get("include_obfuscation"), "include_obfuscation"):
        message = "include_obfuscation must not be true: a replay has the events of the first stream, byte for byte"
        raise InvalidRequestError(message, param="include_obfuscation")
    include = read_include(request)
    stored = await context.store.read(lambda transaction: load_response(transaction, response_id, tenant))
    if not is_stream:
        sealer = await context.store.run(lambda: Sealer(context.store.folder, tenant))
        output = with_included(stored.response["output"], include, sealer.seal)
        return json_answer({**stored.response, "output": output})
    if not stored.response["background"]:
        message = "stream must not be true: only responses that were made in the background can be replayed"
        raise InvalidRequestError(message, param="stream")
    return followed(context, response_id, tenant, after, {})


@router.delete("/v1/responses/{response_id}")
async def delete(response_id: str, request: Request, context: Context) -> Response:
    """Delete a response. One that is being made in the background ends."""
    tenant = tenant_of(request)
    if not await context.store.write(lambda transaction: transaction.delete(RESPONSE, response_id, tenant)):
        raise NotFoundError(f"the response {shown(response_id)} does not exist")
    await _stop(context, response_id)
    return json_answer({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(response_id: str, request: Request, context: Context) -> Response:
    """Stop a response that is being made in the background. One that is done stays as it is."""
    tenant = tenant_of(request)

    def work(transaction: Transaction) -> None:
        stored = load_response(transaction, response_id, tenant)
        if not stored.response["background"]:
            raise InvalidRequestError("only a response that is made in the background can be cancelled")
        if not stored.is_done:
            mark_cancelled(transaction, response_id, tenant)

    await context.store.write(work)
    await _stop(context, response_id)
    stored = await context.store.read(lambda transaction: load_response(transaction, response_id, tenant))
    return json_answer(stored.response)


async def _stop(context: ServerContext, response_id: str) -> None:
    """Let a response that was deleted or cancelled end now, if this process makes it; another one looks for itself."""
    if stop := context.lifecycle.background.get(response_id):
        await stop()


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(response_id: str, request: Request, context: Context) -> Response:
    """The items that the response was made from, as far as they are stored, a page at a time."""
    tenant = tenant_of(request)
    asked, include = read_page(request, max_limit=MAX_PAGE, default_limit=20), read_include(request)
    items = await context.store.read(lambda transaction: stored_input(transaction, response_id, tenant))
    sealer = await context.store.run(lambda: Sealer(context.store.folder, tenant))

    def page() -> Response:
        rest, after = iter(items if asked.order == "asc" else items[::-1]), asked.after
        if after is not None and not any(id_of(item) == after for item in rest):
            raise InvalidRequestError(f"after must be the id of an item of the list, got {shown(after)}", param="after")
        given = [msgspec.json.decode(item) for item in islice(rest, asked.limit)]
        ends = {"first_id": given[0]["id"], "last_id": given[-1]["id"]} if given else {"first_id": "", "last_id": ""}
        data, has_more = with_included(given, include, sealer.seal), next(rest, None) is not None
        return json_answer({"object": "list", "data": data, **ends, "has_more": has_more})

    return await context.workers.run_light(sum(map(len, items)), page)


@body_router.post("/v1/responses/compact")
async def compact(body: CompactBody, request: Request, context: Context) -> Response:
    """Summarise the items. The summary is as long as the context has room for, and at most `MAX_SUMMARY_TOKENS`."""
    given = {name: getattr(body, name) for name in CompactBody.model_fields}
    asked = ResponseBody(**given, reasoning=ReasoningOptions(effort="none"))
    model, tenant = await context.check_model(request, body.model), tenant_of(request)
    inputs = await input_items(asked, request, context)
    items = inputs.all
    if not items:
        raise InvalidRequestError("input must hold at least one item, got none", param="input")
    sealer = await context.store.run(lambda: Sealer(context.store.folder, tenant))
    last = InputItem(ResponseItem(role="user", content=INSTRUCTION), "input")
    chat, wishes = await read_chat(asked, [*items, last], sealer, model, request, context, inputs.size)
    task = await read_task(
        asked,
        request,
        context,
        REFUSED_IN_COMPACT,
        sent=body,
        input=chat,
        wishes=replace(wishes, thinking=replace(wishes.thinking, ignored=())),
        max_tokens=MAX_SUMMARY_TOKENS,
        accepted=ACCEPTED,
    )
    ((choice,), report) = await complete(replace(task, fits_context=True, size=inputs.size), request, context)
    if not choice.text.strip():
        raise InternalError("the model wrote no summary of the input")
    id = f"resp_{secrets.token_hex(24)}"
    kept = items_to_store((each.item for each in items if each.item.role == "user"), id)
    summary = CompactionItem(item_id("cmp", id, 0), sealer.seal("compaction", choice.text))
    answer = CompactedResponse(id, int(time.time()), [*kept, summary], usage_of(report.counts()))
    return json_answer(answer, ignored_header(task.ignored))


router.include_router(body_router)


def _flag(text: str | None, name: str) -> bool:
    is_true = {None: False, "false": False, "0": False, "true": True, "1": True}.get(text and text.lower())
    if is_true is None:
        raise InvalidRequestError(f"{name} must be true or false, got {shown(text)}", param=name)
    return is_true


def _number(text: str | None, name: str, default: int) -> int:
    if text is None:
        return default
    if not text.isdecimal() or len(text) > 9:
        raise InvalidRequestError(f"{name} must be a whole number, got {shown(text)}", param=name)
    return int(text)
