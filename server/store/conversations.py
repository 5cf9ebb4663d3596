"""Stored conversations: a row each, and a row for each item, which is a part of it.

An append is one transaction, so what two responses add at the same time is all there. A conversation is read as a whole
into a prompt, so it is bounded in items and bytes. Writes check everything before they change anything.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from weft.server.errors import InvalidRequestError, NotFoundError, shown
from weft.server.store.transaction import Row, Transaction

KIND = "conversation"
ITEM = "conversation_item"
MAX_ITEMS = 2**12
MAX_BYTES = 1 << 25
MAX_ID_CHARS = 64
CONVERSATION_DIGITS = 24
"""Digits of a conversation's id. The ids of items that are added to it begin with them, so a reference finds them."""


class StoredConversation(msgspec.Struct):
    """What a conversation is, and the extent of its items."""

    id: str
    created_at: int
    metadata: dict[str, str]
    num_items: int = 0
    num_bytes: int = 0

    def row(self, tenant: str) -> Row:
        """The row to write."""
        return Row(KIND, self.id, tenant, msgspec.json.encode(self))


def load(transaction: Transaction, id: str, tenant: str) -> StoredConversation:
    """The conversation.

    Raises:
        NotFoundError: This tenant has none with that id.
    """
    row = transaction.get(KIND, id, tenant)
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
    load(transaction, id, tenant)
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
    for row in grown(transaction, load(transaction, id, tenant), tenant, items, at):
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
    conversation = load(transaction, id, tenant)
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
    load(transaction, id, tenant)
    row = transaction.get(ITEM, item_row_id(id, item_id), tenant)
    if row is None:
        raise NotFoundError(f"the item {shown(item_id)} is not in the conversation", param="item_id")
    return row
