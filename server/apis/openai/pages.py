"""Answers in JSON, and lists of stored objects in OpenAI's shape: the query that asks for a part of one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.server.errors import InvalidRequestError, shown
from weft.server.store.transaction import Order, Row
from weft.server.task.validation import check_range


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list the query asks for: up to `limit` objects behind `after`."""

    limit: int
    order: Order
    after: str | None


def read_page(request: Request, *, max_limit: int, default_limit: int) -> Page:
    """Read the query.

    Raises:
        InvalidRequestError: A value is out of range.
    """
    query = request.query_params
    given = query.get("limit", str(default_limit))
    if not (given.isascii() and given.lstrip("-").isdecimal() and len(given) < 10):
        raise InvalidRequestError(f"limit must be a whole number, got {shown(given)}", param="limit")
    chosen = query.get("order", "desc")
    if chosen not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc, got {shown(chosen)}", param="order")
    limit = check_range("limit", int(given), 1, max_limit)
    return Page(limit, "asc" if chosen == "asc" else "desc", query.get("after"))


def list_answer(
    rows: Sequence[Row] | None, page: Page, show: Callable[[Row], bytes] = lambda row: row.data
) -> Response:
    """The answer to a list for which `page.limit + 1` rows were asked.

    Raises:
        InvalidRequestError: There is no object `after`.
    """
    if rows is None:
        message = f"after must be the id of an object in the list, got {shown(page.after)}"
        raise InvalidRequestError(message, param="after")
    shown_rows = rows[: page.limit]
    return json_answer(
        {
            "object": "list",
            "data": [msgspec.Raw(show(row)) for row in shown_rows],
            "first_id": shown_rows[0].id if shown_rows else None,
            "last_id": shown_rows[-1].id if shown_rows else None,
            "has_more": len(rows) > page.limit,
        }
    )


def json_answer(value: object, headers: Mapping[str, str] | None = None) -> Response:
    """A value as JSON."""
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")
