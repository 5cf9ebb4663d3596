"""What is kept of responses and conversations, as rows of the store.

A conversation is a row, and a row for each item. A response is one row with its own input and output; a chain of
responses is read link by link. What is read for one request is bounded in items and bytes. Items stay JSON until they
are needed. Writes check everything before they change anything.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from weft.server.apis.responses.schema import OtherItem, ResponseItem
from weft.server.errors import InvalidRequestError, NotFoundError, shown
from weft.server.store.transaction import Row, Transaction

CONVERSATION = "conversation"
ITEM = "conversation_item"
MAX_ITEMS = 2**12
MAX_BYTES = 1 << 25
MAX_ID_CHARS = 64
CONVERSATION_DIGITS = 24
"""Digits of a conversation's id. The ids of items that are added to it begin with them, so a reference finds them."""


class StoredConversation(msgspec.Struct):
    """What a conversation is, and the extent of its items, which are rows of their own.

    An append is one transaction, so what two responses add at the same time is all there. A conversation is read as a
    whole into a prompt, so it is bounded in items and bytes.
    """

    id: str
    created_at: int
    metadata: dict[str, str]
    num_items: int = 0
    num_bytes: int = 0

    def row(self, tenant: str) -> Row:
        """The row to write."""
        return Row(CONVERSATION, self.id, tenant, msgspec.json.encode(self))


def load_conversation(transaction: Transaction, id: str, tenant: str) -> StoredConversation:
    """The conversation.

    Raises:
        NotFoundError: This tenant has none with that id.
    """
    row = transaction.get(CONVERSATION, id, tenant)
    if row is None:
        raise NotFoundError(f"the conversation {shown(id)} does not exist", param="conversation")
    return msgspec.json.decode(row.data, type=StoredConversation)


def item_row_id(id: str, item_id: str) -> str:
    """The id of an item's row: two conversations may hold items with the same id."""
    return f"{id}/{item_id}"


def all_items(transaction: Transaction, id: str, tenant: str) -> list[msgspec.Raw]:
    """All items of a conversation, oldest first, as JSON.

    Raises:
        NotFoundError: The conversation does not exist.
    """
    load_conversation(transaction, id, tenant)
    rows = transaction.page(ITEM, tenant, parent=id, limit=MAX_ITEMS, order="asc")
    return [msgspec.Raw(row.data) for row in rows or ()]


def grown(
    transaction: Transaction, conversation: StoredConversation, tenant: str, items: Sequence[dict[str, Any]], at: str
) -> list[Row]:
    """The rows that more items take, the conversation's own among them. `at` is the field that errors name.

    Raises:
        InvalidRequestError: An id is too long or taken, or the conversation would become too large.
    """
    rows, seen = [], set[str]()
    for i, item in enumerate(items):
        id = item["id"]
        row_id = item_row_id(conversation.id, id)
        if len(id) > MAX_ID_CHARS or id in seen or transaction.get(ITEM, row_id, tenant):
            message = f"{at}[{i}].id must be new in the conversation and have at most {MAX_ID_CHARS} characters"
            raise InvalidRequestError(f"{message}, got {shown(id)}", param=f"{at}[{i}].id")
        seen.add(id)
        rows.append(Row(ITEM, row_id, tenant, msgspec.json.encode(item), parent=conversation.id))
    conversation.num_items += len(rows)
    conversation.num_bytes += sum(len(row.data) for row in rows)
    if conversation.num_items > MAX_ITEMS or conversation.num_bytes > MAX_BYTES:
        message = f"the conversation must have at most {MAX_ITEMS} items with {MAX_BYTES} bytes"
        got = f"{conversation.num_items} and {conversation.num_bytes}"
        raise InvalidRequestError(f"{message}, got {got} with those of {at}", param=at)
    return [conversation.row(tenant), *rows]


def append(transaction: Transaction, id: str, tenant: str, items: Sequence[dict[str, Any]], at: str) -> None:
    """Add items at the end of a conversation.

    Raises:
        NotFoundError: The conversation does not exist.
        InvalidRequestError: As `grown`.
    """
    for row in grown(transaction, load_conversation(transaction, id, tenant), tenant, items, at):
        transaction.put(row)


def extend(transaction: Transaction, tenant: str, response: dict[str, Any], own: Sequence[dict[str, Any]]) -> None:
    """Add a response's own input and its output to its conversation, if it has one and there is an answer.

    Raises:
        NotFoundError: The conversation does not exist any more.
        InvalidRequestError: As `grown`.
    """
    output = response["output"]
    if response["conversation"] is not None and output and response["status"] in ("completed", "incomplete"):
        append(transaction, response["conversation"]["id"], tenant, [*own, *output], "input")


def delete_item(transaction: Transaction, id: str, item_id: str, tenant: str) -> StoredConversation:
    """Remove an item.

    Raises:
        NotFoundError: The conversation, or the item in it, does not exist.
    """
    conversation = load_conversation(transaction, id, tenant)
    row = find_item_row(transaction, id, item_id, tenant)
    transaction.delete(ITEM, row.id, tenant)
    conversation.num_items -= 1
    conversation.num_bytes -= len(row.data)
    transaction.put(conversation.row(tenant))
    return conversation


def find_item_row(transaction: Transaction, id: str, item_id: str, tenant: str) -> Row:
    """The row of an item.

    Raises:
        NotFoundError: The conversation, or the item in it, does not exist.
    """
    load_conversation(transaction, id, tenant)
    row = transaction.get(ITEM, item_row_id(id, item_id), tenant)
    if row is None:
        raise NotFoundError(f"the item {shown(item_id)} is not in the conversation", param="item_id")
    return row


RESPONSE = "response"
_CANCELLATION = "cancellation"
DEAD_AFTER_S = 30.0
"""Time since the last write after which nobody makes an unfinished response any more; it is written more often."""
MAX_CHAIN = 2**14
MAX_READ_BYTES = 1 << 30
"""Most bytes of the stored responses that one request leads to, all that they hold counted, such as tools."""
MAX_ITEM_BYTES = 64 << 20
"""Most bytes of the items in them, which are held at once."""
FIRST_INPUT = 0x8000
"""Number of the first item of the input; those of the output begin at 0."""

_LOST = "the server stopped, or could not store the response, before it was complete; ask again"
_DONE = frozenset({"completed", "incomplete", "failed", "cancelled"})


class StoredResponse(msgspec.Struct):
    """The response as JSON data, and its own input items.

    Only the process that makes a response writes it, again and again. Who cancels it adds a part to it. If nothing is
    written for long, that process is dead, and whoever reads the response sees it as failed.
    """

    response: dict[str, Any]
    input: list[dict[str, Any]]

    @property
    def id(self) -> str:
        """The response's id."""
        return str(self.response["id"])

    @property
    def is_done(self) -> bool:
        """Whether nothing will change any more."""
        return self.response["status"] in _DONE

    def row(self, tenant: str) -> Row:
        """The row to write."""
        return Row(RESPONSE, self.id, tenant, msgspec.json.encode(self))


class _Content(msgspec.Struct):
    """What a chain needs of a response."""

    status: str
    output: list[msgspec.Raw]
    previous_response_id: str | None
    conversation: object = None


class _Link(msgspec.Struct):
    """A stored response whose items are not decoded."""

    response: _Content
    input: list[msgspec.Raw]


class _Identified(msgspec.Struct):
    id: str = ""


def id_of(item: msgspec.Raw) -> str:
    """The id of an item, of which nothing else is decoded."""
    return msgspec.json.decode(item, type=_Identified).id


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of an item of a response. It holds the response's, so a reference to an item needs no index."""
    return f"{prefix}_{response_id.partition('_')[2]}{index:04x}"


def _data(transaction: Transaction, response_id: str, tenant: str) -> bytes:
    row = transaction.get(RESPONSE, response_id, tenant)
    if row is None:
        raise NotFoundError(f"the response {shown(response_id)} does not exist")
    return row.data


def load_response(transaction: Transaction, response_id: str, tenant: str) -> StoredResponse:
    """The response; one that was cancelled, or whose process is dead, as it ended.

    Raises:
        NotFoundError: This tenant has none with that id.
    """
    stored = msgspec.json.decode(_data(transaction, response_id, tenant), type=StoredResponse)
    response = stored.response
    if stored.is_done:
        return stored
    if is_cancelled(transaction, response_id, tenant):
        response["status"] = "cancelled"
    elif not is_written(transaction, response_id, tenant):
        response["status"] = "failed"
        response["error"] = {"code": "server_error", "message": _LOST, "type": "server_error", "param": None}
    else:
        return stored
    for item in response["output"]:
        if item.get("status") == "in_progress":
            item["status"] = "incomplete"
    return stored


def cancel(transaction: Transaction, response_id: str, tenant: str) -> None:
    """Tell the process that makes a response that nobody wants it."""
    transaction.put(Row(_CANCELLATION, _part_id(response_id), tenant, b"", response_id))


def is_cancelled(transaction: Transaction, response_id: str, tenant: str) -> bool:
    """Whether an unfinished response was cancelled."""
    return transaction.get(_CANCELLATION, _part_id(response_id), tenant) is not None


def is_written(transaction: Transaction, response_id: str, tenant: str) -> bool:
    """Whether an unfinished response is still being made: it exists, and something was written a short time ago."""
    age = transaction.age(RESPONSE, response_id, tenant)
    return age is not None and age <= DEAD_AFTER_S


def _part_id(response_id: str) -> str:
    return f"{response_id}/{_CANCELLATION}"


def chain(transaction: Transaction, response_id: str, tenant: str, *, needs_all: bool = True) -> list[msgspec.Raw]:
    """All items of the conversation that ends with a response, inputs and outputs, oldest first, as JSON.

    Args:
        needs_all: False: the items begin after the last response that does not exist any more.

    Raises:
        NotFoundError: The response, or an earlier one, does not exist, and all are needed.
        InvalidRequestError: It is not complete, or the conversation is too long.
    """
    links: list[list[msgspec.Raw]] = []
    num_items = num_read = num_held = 0
    wanted: str | None = response_id
    while wanted is not None:
        try:
            data = _data(transaction, wanted, tenant)
        except NotFoundError:
            if needs_all:
                raise
            break
        num_read += len(data)
        _check_bytes(num_read, num_held, "previous_response_id")
        link = msgspec.json.decode(data, type=_Link)
        if link.response.status not in _DONE and not load_response(transaction, wanted, tenant).is_done:
            message = f"previous_response_id must be that of a finished response, but {shown(wanted)} is not"
            raise InvalidRequestError(message, param="previous_response_id")
        if link.response.conversation is not None:
            message = f"previous_response_id must not be that of a response in a conversation, got {shown(wanted)}"
            raise InvalidRequestError(f"{message}: use conversation", param="previous_response_id")
        links.append(_items(link))
        num_items += len(links[-1])
        num_held += sum(map(len, links[-1]))
        if len(links) > MAX_CHAIN or num_items > MAX_CHAIN:
            message = f"previous_response_id must lead to a conversation of at most {MAX_CHAIN} items"
            raise InvalidRequestError(message, param="previous_response_id")
        wanted = link.response.previous_response_id
    _check_bytes(num_read, num_held, "previous_response_id")
    return [item for items in reversed(links) for item in items]


def _items(link: _Link) -> list[msgspec.Raw]:
    """Copies, which keep nothing else of the row."""
    return [item.copy() for item in (*link.input, *link.response.output)]


def _check_bytes(num_read: int, num_held: int, param: str) -> None:
    for number, most, what in ((num_read, MAX_READ_BYTES, "stored responses"), (num_held, MAX_ITEM_BYTES, "items")):
        if number > most:
            message = f"{param} must lead to {what} of at most {most} bytes together, got at least {number}"
            raise InvalidRequestError(message, param=param)


def stored_input(transaction: Transaction, response_id: str, tenant: str) -> list[msgspec.Raw]:
    """All items that a response was made from, oldest first, as JSON; they begin after an earlier one that is gone.

    Raises:
        NotFoundError: The response does not exist.
        InvalidRequestError: As `chain`.
    """
    link = msgspec.json.decode(_data(transaction, response_id, tenant), type=_Link)
    previous = link.response.previous_response_id
    return [*(chain(transaction, previous, tenant, needs_all=False) if previous else ()), *link.input]


REASONING_PREFIX = "rs_"
"""How the ids of reasoning begin, in any server."""


def find_items(transaction: Transaction, wanted: Mapping[str, str], tenant: str) -> dict[str, msgspec.Raw]:
    """The stored items with these ids, as JSON: those of responses, and those that were added to conversations.

    Reasoning may be missing, because a conversation goes on without it.

    Args:
        wanted: The ids, each with the field that errors name.

    Raises:
        NotFoundError: There is no such item.
        InvalidRequestError: What holds them is too large.
    """
    num_read = num_held = 0

    def counted(row: Row | None) -> bytes | None:
        nonlocal num_read
        num_read += len(row.data) if row else 0
        _check_bytes(num_read, num_held, "input")
        return row.data if row else None

    @cache
    def items_of(response_id: str) -> dict[str, msgspec.Raw]:
        nonlocal num_held
        data = counted(transaction.get(RESPONSE, response_id, tenant))
        items = _items(msgspec.json.decode(data, type=_Link)) if data else []
        num_held += sum(map(len, items))
        _check_bytes(num_read, num_held, "input")
        return {id_of(item): item for item in reversed(items)}

    found: dict[str, msgspec.Raw] = {}
    for id, at in wanted.items():
        place = id.partition("_")[2]
        row_id = item_row_id(f"conv_{place[:CONVERSATION_DIGITS]}", id)
        added = counted(transaction.get(ITEM, row_id, tenant))
        item = msgspec.Raw(added) if added else items_of(f"resp_{place[:-4]}").get(id)
        if item is not None:
            found[id] = item
        elif not id.startswith(REASONING_PREFIX):
            raise NotFoundError(f"{at}: the item {shown(id)} is not stored", param=at)
    return found


_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}
_WITHOUT_STATUS = frozenset({"mcp_list_tools", "mcp_approval_request", "mcp_approval_response"})


def items_to_store(items: Iterable[ResponseItem], response_id: str) -> list[dict[str, Any]]:
    """The items in their full form: each with an id and a status, contents as lists of parts."""
    return [_full(item, response_id, i) for i, item in enumerate(items)]


def _full(item: ResponseItem, response_id: str, index: int) -> dict[str, Any]:
    given = dict(item.members) if isinstance(item, OtherItem) else item.model_dump(exclude_none=True)
    kind = given.setdefault("type", "message")
    given.setdefault("id", item_id(_PREFIXES.get(kind, "item"), response_id, FIRST_INPUT + index))
    if kind not in _WITHOUT_STATUS:
        given.setdefault("status", "completed")
    if kind == "message":
        is_output = item.role == "assistant"
        if isinstance(item.content, str):
            given["content"] = [{"type": "output_text" if is_output else "input_text", "text": item.content}]
        for part in given["content"] if is_output else ():
            if part["type"] == "output_text":
                part.setdefault("annotations", [])
    if kind == "reasoning":
        given.setdefault("summary", [])
        if isinstance(item.content, str):
            given["content"] = [{"type": "reasoning_text", "text": item.content}]
    return given
