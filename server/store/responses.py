"""Stored responses: one row each, with its own input and output; a chain is read link by link.

An item's id holds that of its response, so a reference to an item needs no index. An unfinished response has a beat:
when it is old, the process that made the response is dead, and whoever reads it next marks it as failed.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from weft.server.errors import InvalidRequestError, NotFoundError, shown
from weft.server.store.conversations import CONVERSATION_DIGITS, ITEM, item_row_id
from weft.server.store.transaction import Row, Transaction

KIND = "response"
DEAD_AFTER_S = 30.0
"""Age of the beat after which nobody is making the response any more; it beats much more often."""
MAX_CHAIN = 2**14
FIRST_INPUT = 0x8000
"""Number of the first item of the input; those of the output begin at 0."""

_LOST = "the server stopped before the response was complete; ask again"
_DONE = frozenset({"completed", "incomplete", "failed", "cancelled"})


class StoredResponse(msgspec.Struct):
    """The response as JSON data, its own input items, and the beat of an unfinished one."""

    response: dict[str, Any]
    input: list[dict[str, Any]]
    beat: float = 0.0

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
        return Row(KIND, self.id, tenant, msgspec.json.encode(self))


def item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of an item of a response."""
    return f"{prefix}_{response_id.partition('_')[2]}{index:04x}"


def load(transaction: Transaction, response_id: str, tenant: str) -> StoredResponse:
    """The response. Use it where writing is allowed: a dead one is marked.

    Raises:
        NotFoundError: This tenant has none with that id.
    """
    row = transaction.get(KIND, response_id, tenant)
    if row is None:
        raise NotFoundError(f"the response {shown(response_id)} does not exist")
    stored = msgspec.json.decode(row.data, type=StoredResponse)
    if not stored.is_done and stored.beat < time.time() - DEAD_AFTER_S:
        stored.response["status"] = "failed"
        stored.response["error"] = {"code": "server_error", "message": _LOST, "type": "server_error", "param": None}
        transaction.put(stored.row(tenant))
    return stored


def change(response_id: str, tenant: str, edit: Callable[[StoredResponse], None]) -> Callable[[Transaction], Any]:
    """Work that edits a stored response, and returns it."""

    def work(transaction: Transaction) -> StoredResponse:
        stored = load(transaction, response_id, tenant)
        edit(stored)
        transaction.put(stored.row(tenant))
        return stored

    return work


def chain(transaction: Transaction, response_id: str, tenant: str) -> list[dict[str, Any]]:
    """All items of the conversation that ends with a response, inputs and outputs, oldest first.

    Raises:
        NotFoundError: The response, or an earlier one that it needs, does not exist.
        InvalidRequestError: It is not complete, or the conversation is too long.
    """
    links: list[StoredResponse] = []
    num_items = 0
    wanted: str | None = response_id
    while wanted is not None:
        link = load(transaction, wanted, tenant)
        if not link.is_done:
            message = f"previous_response_id must be that of a finished response, but {shown(wanted)} is not"
            raise InvalidRequestError(message, param="previous_response_id")
        if link.response.get("conversation") is not None:
            message = f"previous_response_id must not be that of a response in a conversation, got {shown(wanted)}"
            raise InvalidRequestError(f"{message}: use conversation", param="previous_response_id")
        links.append(link)
        num_items += len(link.input) + len(link.response["output"])
        if len(links) > MAX_CHAIN or num_items > MAX_CHAIN:
            message = f"previous_response_id must lead to a conversation of at most {MAX_CHAIN} items"
            raise InvalidRequestError(message, param="previous_response_id")
        wanted = link.response["previous_response_id"]
    return [item for link in reversed(links) for item in (*link.input, *link.response["output"])]


def find_item(transaction: Transaction, wanted: str, tenant: str, at: str) -> dict[str, Any]:
    """The stored item with an id: one of a response, or one that was added to a conversation.

    Raises:
        NotFoundError: There is none.
    """
    place = wanted.partition("_")[2]
    added = transaction.get(ITEM, item_row_id(f"conv_{place[:CONVERSATION_DIGITS]}", wanted), tenant)
    if added is not None:
        return dict(msgspec.json.decode(added.data))
    row = transaction.get(KIND, f"resp_{place[:-4]}", tenant)
    stored = msgspec.json.decode(row.data, type=StoredResponse) if row else None
    for item in (*stored.input, *stored.response["output"]) if stored else ():
        if item.get("id") == wanted:
            return dict(item)
    raise NotFoundError(f"{at}: the item {shown(wanted)} is not stored", param=at)
