"""Gathers the items that a response is made from: its own, those of its conversation or of the responses before it."""

from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from weft.server.errors import InvalidRequestError
from weft.server.http.auth import tenant_of
from weft.server.http.context import ServerContext
from weft.server.request.response_input import InputItem
from weft.server.request.validation import required
from weft.server.schemas.responses import ResponseBody, ResponseItem
from weft.server.store.conversations import all_items
from weft.server.store.responses import chain, find_items


@dataclass(frozen=True, slots=True)
class GatheredItems:
    """All items of an input: those of earlier responses or of the conversation, and the body's own."""

    earlier: list[InputItem]
    own: list[InputItem]
    size: int  # bytes of the body and of the earlier items

    @property
    def all(self) -> list[InputItem]:
        """The items in the order of the prompt."""
        return [*self.earlier, *self.own]


async def gathered_items(body: ResponseBody, request: Request, context: ServerContext) -> GatheredItems:
    """All items of the input. References are resolved.

    Raises:
        InvalidRequestError: There are both.
        NotFoundError: A response, a conversation or an item is not stored.
    """
    tenant, own, wanted, id = tenant_of(request), _own_items(body), body.previous_response_id, conversation_id(body)
    if wanted is not None and id is not None:
        raise InvalidRequestError("conversation cannot be used with previous_response_id", param="conversation")
    references = {each.at: required(each.item.id, f"{each.at}.id") for each in own if _is_reference(each.item)}
    earlier: list[msgspec.Raw] = []
    if wanted is not None:
        earlier = await context.store.read(lambda transaction: chain(transaction, wanted, tenant))
    if id is not None:
        earlier = await context.store.read(lambda transaction: all_items(transaction, id, tenant))
    num_bytes = sum(map(len, earlier))
    found = {}
    if references:
        place_of = {item_id: at for at, item_id in references.items()}
        by_id = await context.store.read(lambda transaction: find_items(transaction, place_of, tenant))
        num_bytes += sum(len(by_id[item_id]) for item_id in references.values())
        if num_bytes > context.settings.max_body_bytes:
            bound = context.settings.max_body_bytes
            message = f"input and what it refers to must have at most {bound} bytes, got {num_bytes}"
            raise InvalidRequestError(message, param="input")
        found = {at: by_id[item_id] for at, item_id in references.items()}
    place = "previous_response_id" if id is None else "conversation"
    old, new = await context.workers.run_light(
        num_bytes,
        lambda: (
            [_stored_item(item, f"{place}[{i}]") for i, item in enumerate(earlier)],
            [_stored_item(found[each.at], each.at) if each.at in found else each for each in own],
        ),
    )
    return GatheredItems(old, new, num_bytes + len(await request.body()))


def _stored_item(item: msgspec.Raw, at: str) -> InputItem:
    return InputItem(ResponseItem.model_validate(msgspec.json.decode(item)), at)


def conversation_id(body: ResponseBody) -> str | None:
    """The conversation that the body names; None: none."""
    given = body.conversation
    return given if given is None or isinstance(given, str) else given.id


def _is_reference(item: ResponseItem) -> bool:
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


def _own_items(body: ResponseBody) -> list[InputItem]:
    """The items of the body itself."""
    if body.input is None:
        return []
    if isinstance(body.input, str):
        return [InputItem(ResponseItem(type="message", role="user", content=body.input), "input")]
    return [InputItem(item, f"input[{i}]") for i, item in enumerate(body.input)]
