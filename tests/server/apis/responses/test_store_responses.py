"""Stored responses are read within a bound in bytes, once each, and only the items that are wanted are decoded."""

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from weft.server.apis.responses import stored as responses
from weft.server.apis.responses.stored import StoredResponse, item_id
from weft.server.store.transaction import Transaction

Run = Callable[[Callable[[Transaction], Any]], Any]
NUM_LINKS, NUM_PARTS = 8, 20_000


def response(number: int, num_parts: int) -> StoredResponse:
    id, previous = f"resp_{number}", f"resp_{number - 1}" if number else None
    parts = [{"type": "input_text", "text": "a"}] * num_parts
    items = [{"type": "message", "id": item_id("msg", id, i), "role": "user", "content": parts} for i in range(3)]
    head = {"id": id, "status": "completed", "previous_response_id": previous, "output": items[2:]}
    return StoredResponse(head, items[:2])


@pytest.fixture
def stored(site: Any) -> Run:
    """Runs work in a store with a chain of responses."""

    def run(work: Callable[[Transaction], Any]) -> Any:
        return asyncio.run(site.app.state.context.store.write(work))

    run(lambda tx: [tx.put(response(i, NUM_PARTS if i == 5 else 1).row("")) for i in range(NUM_LINKS)])
    return run


def ids_of(page: Any) -> list[str]:
    return [item["id"] for item in page["data"]]


def test_a_page_of_input_items_decodes_no_others(site: Any, stored: Run) -> None:
    """All items of all earlier responses were decoded for each page: ten times their bytes."""
    path, expected = "/v1/responses/resp_7/input_items", [f"msg_{n}000{i}" for n in range(8) for i in range(3)][:-1]
    tracemalloc.start()
    try:
        first = site.call("GET", path, params={"order": "asc", "limit": 3}).json
        last = site.call("GET", path, params={"limit": 3, "after": expected[1]}).json
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (ids_of(first), first["has_more"]) == (expected[:3], True)
    assert (ids_of(last), last["has_more"]) == (expected[:1], False)
    assert peak < 3 * len(response(5, NUM_PARTS).row("").data)


@pytest.mark.parametrize(("bound", "what"), [("MAX_READ_BYTES", "stored responses"), ("MAX_ITEM_BYTES", "items")])
def test_what_a_request_leads_to_is_bounded_in_bytes(
    site: Any, stored: Run, monkeypatch: pytest.MonkeyPatch, bound: str, what: str
) -> None:
    """A chain was bounded in items only, of which each may be as large as a body."""
    monkeypatch.setattr(responses, bound, 10_000)
    error = site.call("POST", "/v1/responses", json={"input": "Hi", "previous_response_id": "resp_7"}).error
    assert error["param"] == "previous_response_id"
    assert f"lead to {what} of at most 10000 bytes together, got at least " in error["message"]
    assert site.call("GET", "/v1/responses/resp_7/input_items").error["param"] == "previous_response_id"
    error = site.call("POST", "/v1/responses", json={"input": [{"id": "msg_50000"}]}).error
    assert (error["param"], "at most 10000 bytes together, got at least " in error["message"]) == ("input", True)
    assert site.call("POST", "/v1/responses", json={"input": "Hi", "previous_response_id": "resp_4"}).status == 200


def test_tools_are_read_with_each_response_and_held_with_none(
    site: Any, stored: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tools of an agent, in every response, counted as its items did: a conversation ended after 838 turns."""
    large = response(1, 1)
    large.response["tools"] = ["x" * 20_000]
    stored(lambda tx: tx.put(large.row("")))
    monkeypatch.setattr(responses, "MAX_ITEM_BYTES", 10_000)
    kept = stored(lambda tx: responses.chain(tx, "resp_2", ""))
    assert sum(map(len, kept)) < 10_000
    assert not any(b"xxx" in bytes(item) for item in kept)


def test_a_response_is_read_once_for_all_references(site: Any, stored: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reference read and decoded all items beside its own: the square of their number."""
    read, get = Counter[str](), Transaction.get

    def counting(self: Transaction, kind: str, id: str, tenant: str | None) -> Any:
        read.update([id] if kind == responses.RESPONSE else ())
        return get(self, kind, id, tenant)

    monkeypatch.setattr(Transaction, "get", counting)
    references = [{"type": "item_reference", "id": f"msg_{n}000{i}"} for n in (3, 4) for i in range(3)]
    assert site.call("POST", "/v1/responses", json={"input": references, "store": False}).status == 200
    assert read == {"resp_3": 1, "resp_4": 1}
