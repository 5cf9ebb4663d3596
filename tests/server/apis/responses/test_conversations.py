"""Conversations through OpenAI's own client and by hand, over a fake engine behind a live server."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.conversations import Conversation, ConversationItemList

from tests.chat_templates_for_tests import QWEN3
from tests.server.apis.responses.test_api_responses import THOUGHT, events_of
from tests.server.apis.responses.test_stored_responses import ANSWER, error, until
from weft.server.apis.responses import stored as conversations

USER = {"type": "message", "role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "x"}


@pytest.fixture
def client(site: Any) -> Iterator[httpx.Client]:
    with site.live() as base_url, httpx.Client(base_url=f"{base_url}/v1", timeout=60) as client:
        yield client


def begin(client: httpx.Client, *items: dict[str, Any]) -> str:
    reply = client.post("conversations", json={"items": items})
    Conversation.model_validate_json(reply.text, strict=True)
    return str(reply.json()["id"])


def listed(client: httpx.Client, id: str, **query: Any) -> list[dict[str, Any]]:
    reply = client.get(f"conversations/{id}/items", params={"order": "asc", "limit": 100, **query})
    ConversationItemList.model_validate_json(reply.text, strict=True)
    return list(reply.json()["data"])


def texts(client: httpx.Client, id: str) -> list[str]:
    return [item["content"][0]["text"] for item in listed(client, id)]


def test_the_sdk_keeps_a_conversation(site: Any) -> None:
    with site.live() as base_url, openai.OpenAI(base_url=f"{base_url}/v1", api_key="k", max_retries=0) as sdk:
        made = sdk.conversations.create(items=[USER], metadata={"a": "b"})  # type: ignore[list-item]
        assert (made.object, made.metadata) == ("conversation", {"a": "b"})
        assert sdk.conversations.retrieve(made.id) == made
        assert sdk.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
        added = sdk.conversations.items.create(made.id, items=[CALL, OUTPUT])  # type: ignore[list-item]
        assert [item.type for item in added.data] == ["function_call", "function_call_output"]
        answer = sdk.responses.create(model="alias", input="And?", conversation=made.id)
        assert answer.conversation is not None and answer.conversation.id == made.id
        items = list(sdk.conversations.items.list(made.id, order="asc", limit=2))  # follows the pages
        kinds = ["message", "function_call", "function_call_output", "message", "message"]
        assert [item.type for item in items] == kinds
        assert items[-1].id == answer.output[0].id
        one = sdk.conversations.items.retrieve(str(items[0].id), conversation_id=made.id)
        assert one == items[0]
        assert sdk.conversations.items.delete(str(items[3].id), conversation_id=made.id).id == made.id
        assert len(list(sdk.conversations.items.list(made.id))) == 4
        counted = sdk.responses.input_tokens.count(model="alias", input="x", conversation={"id": made.id})  # type: ignore[arg-type]
        assert counted.input_tokens > sdk.responses.input_tokens.count(model="alias", input="x").input_tokens
        assert sdk.conversations.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError):
            sdk.conversations.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            sdk.conversations.items.list(made.id)


@pytest.mark.parametrize("how", [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}])
def test_a_response_reads_the_conversation_and_adds_to_it(client: httpx.Client, site: Any, how: Any) -> None:
    id = begin(client, {"role": "developer", "content": "Be kind."})
    for question in ("q0", "q1"):
        reply = client.post("responses", json={"input": question, "instructions": "i", "conversation": id, **how})
        made = events_of(reply.text)[-1]["response"] if how.get("stream") else reply.json()
        until(lambda made=made: client.get(f"responses/{made['id']}").json()["status"] == "completed")
        assert made["conversation"] == {"id": id}
    said = [(message["role"], message["content"]) for message in site.tokenizer.rendered]
    assert said == [("system", "i"), ("developer", "Be kind."), ("user", "q0"), ("assistant", ANSWER), ("user", "q1")]
    assert texts(client, id) == ["Be kind.", "q0", ANSWER, "q1", ANSWER]
    assert listed(client, id)[-1] == client.get(f"responses/{made['id']}").json()["output"][0]


def test_a_response_that_is_not_stored_still_adds_to_its_conversation(client: httpx.Client) -> None:
    id = begin(client)
    made = client.post("responses", json={"input": "a", "conversation": {"id": id}, "store": False}).json()
    assert texts(client, id) == ["a", ANSWER]
    assert client.get(f"responses/{made['id']}").status_code == 404


def test_responses_at_the_same_time_lose_no_items(client: httpx.Client) -> None:
    id = begin(client)
    with ThreadPoolExecutor(8) as threads:
        asked = [
            threads.submit(client.post, "responses", json={"input": f"q{i}", "conversation": id}) for i in range(8)
        ]
        assert [each.result().status_code for each in asked] == [200] * 8
    found = texts(client, id)
    assert sorted(found[::2]) == [f"q{i}" for i in range(8)]  # question and answer stay together
    assert found[1::2] == [ANSWER] * 8


@pytest.mark.parametrize("how", [{}, {"stream": True}, {"background": True, "stream": True}])
def test_what_cannot_be_added_is_told_and_nothing_is_stored(client: httpx.Client, site: Any, how: Any) -> None:
    """The conversation is deleted while the response is made."""
    is_deleted = False
    site.engine.may_go_on = lambda num_read: num_read < 3 or is_deleted
    id = begin(client)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.post, "responses", json={"input": "a", "conversation": id, **how})
        until(lambda: bool(site.engine.asked) and site.engine.asked[0].generation.num_read == 3)
        assert client.delete(f"conversations/{id}").status_code == 200
        is_deleted = True
        reply = asked.result()
    if not how:
        assert error(reply)[:2] == (404, "not_found")
        return
    last = events_of(reply.text)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    stored = client.get(f"responses/{last['response']['id']}")
    assert stored.json().get("status", "none") == ("failed" if how.get("background") else "none")


def test_what_fails_or_is_cancelled_adds_nothing(client: httpx.Client, site: Any) -> None:
    id = begin(client, USER)
    site.engine.may_go_on = lambda num_read: num_read < 3
    made = client.post("responses", json={"input": "a", "conversation": id, "background": True}).json()
    client.post(f"responses/{made['id']}/cancel")
    until(lambda: site.app.state.lifecycle.num_active == 0)
    assert texts(client, id) == ["Hi"]


def test_an_item_of_a_conversation_is_referred_to(client: httpx.Client, site: Any) -> None:
    (item,) = listed(client, begin(client, USER))
    body = {"input": [{"type": "item_reference", "id": item["id"]}]}
    made = client.post("responses", json=body).json()
    assert [message["content"] for message in site.tokenizer.rendered] == ["Hi"]
    client.post("responses", json={"input": "b", "previous_response_id": made["id"]})
    assert [message["content"] for message in site.tokenizer.rendered] == ["Hi", ANSWER, "b"]


def test_mistakes_are_named(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    id = begin(client, {**USER, "id": "msg_1"})
    made = client.post("responses", json={"input": "a", "conversation": id}).json()

    def ask(**body: Any) -> Any:
        return error(client.post("responses", json={"input": "a", **body}))

    def add(*items: dict[str, Any]) -> Any:
        return error(client.post(f"conversations/{id}/items", json={"items": items}))

    assert ask(conversation=id, previous_response_id=made["id"]) == (400, "invalid_value", "conversation")
    assert ask(previous_response_id=made["id"]) == (400, "invalid_value", "previous_response_id")
    assert ask(conversation="conv_x") == (404, "not_found", "conversation")
    assert ask(conversation=3) == (400, "invalid_type", "conversation")
    assert ask(conversation=id, input=[{**USER, "id": "msg_1"}]) == (400, "invalid_value", "input[0].id")
    assert add(*[USER] * 21) == (400, "invalid_value", "items")
    assert add({**USER, "id": "msg_1"}) == (400, "invalid_value", "items[0].id")
    assert add({**USER, "id": "x" * 65}) == (400, "invalid_value", "items[0].id")
    assert add(USER, {"type": 3}) == (400, "invalid_type", "items[1].type")
    assert add({"role": "user"}) == (400, "invalid_value", "items[0].content")
    assert error(client.post("conversations", json={"metadata": {"a" * 65: ""}}))[0] == 400
    assert error(client.post(f"conversations/{id}", json={})) == (400, "invalid_value", "metadata")
    for query in ({"limit": 101}, {"order": "up"}, {"after": "x"}, {"include": "everything"}):
        assert error(client.get(f"conversations/{id}/items", params=query))[2] == next(iter(query))
    for path in (f"{id}/items/msg_x", "conv_x", "conv_x/items", "conv_x/items/y"):
        assert error(client.get(f"conversations/{path}"))[0] == 404
    assert error(client.delete(f"conversations/{id}/items/msg_x"))[0] == 404
    assert texts(client, id) == ["Hi", "a", ANSWER]


def test_a_conversation_is_bounded_in_items_and_bytes(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    id = begin(client, USER, USER)
    monkeypatch.setattr(conversations, "MAX_ITEMS", 3)
    assert client.post("responses", json={"input": "a", "conversation": id}).status_code == 400  # with its answer: 4
    client.delete(f"conversations/{id}/items/{listed(client, id)[0]['id']}")
    assert client.post("responses", json={"input": "a", "conversation": id}).status_code == 200
    monkeypatch.undo()
    monkeypatch.setattr(conversations, "MAX_BYTES", 1000)
    big = {**USER, "content": "x" * 1000}
    assert error(client.post(f"conversations/{id}/items", json={"items": [big]}))[2] == "items"
    assert texts(client, id) == ["Hi", "a", ANSWER]


def test_one_key_does_not_see_the_conversations_of_another(make_site: Any) -> None:
    site = make_site(api_key=("a", "b"))
    keys = [{"Authorization": f"Bearer {key}"} for key in "ab"]
    with site.live() as base_url, httpx.Client(base_url=f"{base_url}/v1", timeout=60) as client:
        made = client.post("conversations", json={"items": [USER]}, headers=keys[0]).json()
        item = client.get(f"conversations/{made['id']}/items", headers=keys[0]).json()["data"][0]
        for path in (made["id"], f"{made['id']}/items", f"{made['id']}/items/{item['id']}"):
            assert [client.get(f"conversations/{path}", headers=key).status_code for key in keys] == [200, 404]
        body = {"input": "a", "conversation": made["id"]}
        assert client.post("responses", json=body, headers=keys[1]).status_code == 404
        reference = {"input": [{"type": "item_reference", "id": item["id"]}]}
        assert [client.post("responses", json=reference, headers=key).status_code for key in keys] == [200, 404]
        assert client.delete(f"conversations/{made['id']}", headers=keys[1]).status_code == 404


def test_reasoning_is_sealed_on_request(make_site: Any) -> None:
    site = make_site()
    site.tokenizer.template, site.tokenizer.added_ids = QWEN3, {"<think>": 300, "</think>": 301}
    site.rebuild()
    site.engine.answers = [f"{THOUGHT}Look."]
    with site.live() as base_url, httpx.Client(base_url=f"{base_url}/v1", timeout=60) as client:
        id = begin(client)
        made = client.post("responses", json={"input": "a", "conversation": id}).json()
        assert "encrypted_content" not in listed(client, id)[1]
        sealed = listed(client, id, **{"include[]": "reasoning.encrypted_content"})[1]["encrypted_content"]
        bare = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed}
        assert client.post("responses", json={"input": [USER, bare]}).status_code == 200
        assert site.tokenizer.rendered[1]["reasoning_content"] == "well"
        given = {"type": "reasoning", "summary": [], "content": "short"}
        added = client.post(f"conversations/{id}/items?include=reasoning.encrypted_content", json={"items": [given]})
        assert added.json()["data"][0]["content"] == [{"type": "reasoning_text", "text": "short"}], added.text
        shown = client.get(f"responses/{made['id']}", params={"include": "reasoning.encrypted_content"}).json()
        assert shown["output"][0]["encrypted_content"]


@pytest.mark.parametrize("is_full", [False, True])
def test_a_full_disk_stores_nothing_of_a_turn(client: httpx.Client, site: Any, is_full: bool) -> None:
    id = begin(client, USER)
    connection = site.app.state.context.store._writer.connection
    if is_full:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
    body = {
        "input": "x" * 500,
        "instructions": None,
        "conversation": id,
        "metadata": {str(i): "y" * 500 for i in range(16)},
    }
    reply = client.post("responses", json=body)
    assert reply.status_code == (507 if is_full else 200)
    assert len(listed(client, id)) == (1 if is_full else 3)


def test_many_responses_and_conversations_stay_within_their_bounds(make_site: Any) -> None:
    """Through HTTP; the whole figures are measured apart from the tests."""
    site = make_site(store_max_objects=60, store_max_bytes=200_000)
    store = site.app.state.context.store
    with site.live() as base_url, httpx.Client(base_url=f"{base_url}/v1", timeout=60) as client:
        for i in range(30):
            id = begin(client, USER)
            for question in (f"q{i}", "x" * 500):
                assert client.post("responses", json={"input": question, "conversation": id}).status_code == 200
        connection = store._writer.connection
        (count, size) = connection.execute("SELECT count, size FROM totals WHERE is_kept = 0").fetchone()
        assert (count, size) == connection.execute("SELECT count(*), sum(size) FROM objects").fetchone()
        assert 30 < count <= 60 and size <= 200_000
        assert texts(client, id) == ["Hi", "q29", ANSWER, "x" * 500, ANSWER]  # the newest is whole
    with contextlib.closing(store):
        pass
    assert sum(path.stat().st_size for path in store.folder.iterdir()) < 1_000_000
