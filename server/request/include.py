"""The query `include` of stored responses and items: what is shown beside what is stored.

Log-probabilities are shown where they were asked for when the response was made. What belongs to hosted tools, of which
there are none, adds nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any, get_args

from starlette.requests import Request

from weft.server.errors import InvalidRequestError, shown
from weft.server.request.response_options import ENCRYPTED
from weft.server.schemas.responses import Includable


def read_include(request: Request) -> frozenset[str]:
    """The values, which SDKs send as `include[]`.

    Raises:
        InvalidRequestError: There is no such value.
    """
    query = request.query_params
    values = [*query.getlist("include"), *query.getlist("include[]")]
    for value in values:
        if value not in get_args(Includable):
            bound = ", ".join(get_args(Includable))
            raise InvalidRequestError(f"include must be among {bound}, got {shown(value)}", param="include")
    return frozenset(values)


def with_included(
    items: Iterable[dict[str, Any]], include: frozenset[str], seal: Callable[[str, str], str]
) -> list[dict[str, Any]]:
    """Stored items with what is to be included: reasoning is sealed if wanted."""
    if ENCRYPTED not in include:
        return list(items)
    return [_sealed(item, seal) if item["type"] == "reasoning" and item.get("content") else item for item in items]


def _sealed(item: dict[str, Any], seal: Callable[[str, str], str]) -> dict[str, Any]:
    return {**item, "encrypted_content": seal("reasoning", "".join(part.get("text") or "" for part in item["content"]))}
