"""/v1/conversations and their items: what responses continue, and what they add to."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from weft.server.apis.openai.pages import json_answer, read_page
from weft.server.apis.responses import stored as storage
from weft.server.apis.responses.answers import ConversationObject
from weft.server.apis.responses.input import InputItem, check_items
from weft.server.apis.responses.options import read_include, with_included
from weft.server.apis.responses.schema import ConversationBody, ConversationUpdate, ItemsBody, ResponseItem
from weft.server.apis.responses.sealing import Sealer
from weft.server.errors import InvalidRequestError, NotFoundError, shown
from weft.server.http.auth import tenant_of
from weft.server.http.context import Context, ServerContext
from weft.server.store.transaction import Row, Transaction
from weft.server.task.body import BodyRoute
from weft.server.task.validation import ignored_fields, ignored_header

router = APIRouter()
body_router = APIRouter(route_class=BodyRoute)


@body_router.post("/v1/conversations")
async def create(body: ConversationBody, request: Request, context: Context) -> Response:
    """Begin a conversation."""
    tenant, headers = tenant_of(request), await _ignored(body, request, context)
    new_id = f"conv_{secrets.token_hex(storage.CONVERSATION_DIGITS // 2)}"
    made = storage.StoredConversation(new_id, int(time.time()), body.metadata or {})
    items = await _full_items(body.items or [], made.id, request, context)

    def work(transaction: Transaction) -> None:
        transaction.put(made.row(tenant))
        storage.append(transaction, made.id, tenant, items, "items")

    await context.store.write(work)
    return _shown(made, headers)


@router.get("/v1/conversations/{conversation_id}")
async def retrieve(conversation_id: str, request: Request, context: Context) -> Response:
    """The conversation, without its items."""
    stored = await context.store.read(lambda each: storage.load_conversation(each, conversation_id, tenant_of(request)))
    return _shown(stored)


@body_router.post("/v1/conversations/{conversation_id}")
async def update(conversation_id: str, body: ConversationUpdate, request: Request, context: Context) -> Response:
    """Replace the metadata."""
    tenant, headers = tenant_of(request), await _ignored(body, request, context)

    def work(transaction: Transaction) -> storage.StoredConversation:
        found = storage.load_conversation(transaction, conversation_id, tenant)
        found.metadata = body.metadata or {}
        transaction.put(found.row(tenant))
        return found

    return _shown(await context.store.write(work), headers)


@router.delete("/v1/conversations/{conversation_id}")
async def delete(conversation_id: str, request: Request, context: Context) -> Response:
    """Delete a conversation and its items. Responses in it stay."""
    tenant = tenant_of(request)
    if not await context.store.write(
        lambda transaction: transaction.delete(storage.CONVERSATION, conversation_id, tenant)
    ):
        raise NotFoundError(f"the conversation {shown(conversation_id)} does not exist")
    return json_answer({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@body_router.post("/v1/conversations/{conversation_id}/items")
async def create_items(conversation_id: str, body: ItemsBody, request: Request, context: Context) -> Response:
    """Add items at the end."""
    tenant, headers, include = tenant_of(request), await _ignored(body, request, context), read_include(request)
    items = await _full_items(body.items, conversation_id, request, context)
    await context.store.write(lambda each: storage.append(each, conversation_id, tenant, items, "items"))
    answer = await _listed(items, include, request, context)
    answer.headers.update(headers)
    return answer


@router.get("/v1/conversations/{conversation_id}/items")
async def list_items(conversation_id: str, request: Request, context: Context) -> Response:
    """The items, a page at a time."""
    tenant, include = tenant_of(request), read_include(request)
    page = read_page(request, max_limit=100, default_limit=20)
    after = None if page.after is None else storage.item_row_id(conversation_id, page.after)

    def work(transaction: Transaction) -> Sequence[Row] | None:
        storage.load_conversation(transaction, conversation_id, tenant)
        limit = page.limit + 1
        return transaction.page(
            storage.ITEM, tenant, parent=conversation_id, after=after, limit=limit, order=page.order
        )

    rows = await context.store.read(work)
    if rows is None:
        message = f"after must be the id of an item of the conversation, got {shown(page.after)}"
        raise InvalidRequestError(message, param="after")
    items = [msgspec.json.decode(row.data) for row in rows[: page.limit]]
    return await _listed(items, include, request, context, has_more=len(rows) > page.limit)


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def retrieve_item(conversation_id: str, item_id: str, request: Request, context: Context) -> Response:
    """One item."""
    tenant, include = tenant_of(request), read_include(request)
    row = await context.store.read(lambda each: storage.find_item_row(each, conversation_id, item_id, tenant))
    (item,) = with_included([msgspec.json.decode(row.data)], include, (await _sealer(request, context)).seal)
    return json_answer(item)


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def remove_item(conversation_id: str, item_id: str, request: Request, context: Context) -> Response:
    """Delete one item; the answer is the conversation."""
    tenant = tenant_of(request)
    return _shown(await context.store.write(lambda each: storage.delete_item(each, conversation_id, item_id, tenant)))


async def _ignored(body: BaseModel, request: Request, context: ServerContext) -> dict[str, str]:
    strict, size = context.settings.strict_params, len(await request.body())
    ignored = await context.workers.run_light(size, ignored_fields, body, {}, strict=strict, accepted=frozenset())
    return ignored_header(ignored)


async def _full_items(
    items: Sequence[ResponseItem], conversation_id: str, request: Request, context: ServerContext
) -> list[dict[str, Any]]:
    """Checked items as they are stored; those without an id have one that begins with the conversation's digits."""
    given = [InputItem(item, f"items[{i}]") for i, item in enumerate(items)]
    size, sealer = len(await request.body()), await _sealer(request, context)
    await context.workers.run_light(size, check_items, given, sealer.unseal)
    return storage.items_to_store((each.item for each in given), conversation_id + secrets.token_hex(10))


async def _sealer(request: Request, context: ServerContext) -> Sealer:
    return await context.store.run(lambda: Sealer(context.store.folder, tenant_of(request)))


async def _listed(
    items: Sequence[dict[str, Any]],
    include: frozenset[str],
    request: Request,
    context: ServerContext,
    *,
    has_more: bool = False,
) -> Response:
    data = with_included(items, include, (await _sealer(request, context)).seal)
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": "", "last_id": ""}
    return json_answer({"object": "list", "data": data, **ends, "has_more": has_more})


def _shown(stored: storage.StoredConversation, headers: dict[str, str] | None = None) -> Response:
    answer = json_answer(ConversationObject(stored.id, stored.created_at, stored.metadata))
    answer.headers.update(headers or {})
    return answer


router.include_router(body_router)
