"""Stored responses, chains of them, and responses in the background, through a live server over a fake engine."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from openai.types.responses.response_item_list import ResponseItemList

from tests.chat_templates_for_tests import QWEN3
from tests.server.apis.responses.test_api_responses import CALL, THOUGHT, WEATHER, events_of
from weft.server.apis.responses import background
from weft.server.apis.responses.background import follow
from weft.server.apis.responses.stored import DEAD_AFTER_S, RESPONSE, StoredResponse, cancel, load_response
from weft.server.errors import EngineDiedError
from weft.server.store.transaction import Transaction

ANSWER = "Hällo, wörld!"


@pytest.fixture
def client(site: Any) -> Iterator[httpx.Client]:
    with site.live() as base_url, httpx.Client(base_url=f"{base_url}/v1", timeout=60) as client:
        yield client


def ask(client: httpx.Client, **body: Any) -> Any:
    reply = client.post("responses", json={"input": "Hi", **body})
    if reply.status_code == 200 and not body.get("stream"):
        Response.model_validate_json(reply.text, strict=True)
    return reply


def error(reply: httpx.Response) -> tuple[int, str | None, str | None]:
    fields = reply.json()["error"]
    return reply.status_code, fields["code"], fields["param"]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def write(site: Any, work: Callable[[Transaction], Any]) -> None:
    asyncio.run(site.app.state.context.store.write(work))


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_is_kept_until_it_is_deleted(client: httpx.Client, is_stream: bool) -> None:
    reply = ask(client, stream=is_stream, metadata={"a": "b"})
    made = events_of(reply.text)[-1]["response"] if is_stream else reply.json()
    assert made["store"] is True
    assert client.get(f"responses/{made['id']}").json() == made
    assert client.delete(f"responses/{made['id']}").json() == {"id": made["id"], "object": "response", "deleted": True}
    assert error(client.get(f"responses/{made['id']}"))[:2] == (404, "not_found")
    assert error(client.delete(f"responses/{made['id']}"))[:2] == (404, "not_found")


def test_what_is_not_to_be_stored_is_not(client: httpx.Client) -> None:
    made = ask(client, store=False).json()
    assert client.get(f"responses/{made['id']}").status_code == 404


def test_a_conversation_is_the_whole_chain_without_its_instructions(client: httpx.Client, site: Any) -> None:
    previous = None
    for i in range(4):
        made = ask(client, input=f"q{i}", instructions=f"i{i}", previous_response_id=previous).json()
        previous = made["id"]
    turns = [(message["role"], message["content"]) for message in site.tokenizer.rendered]
    said = [turn for i in range(3) for turn in (("user", f"q{i}"), ("assistant", ANSWER))]
    assert turns == [("system", "i3"), *said, ("user", "q3")]
    assert error(ask(client, previous_response_id="resp_unknown"))[:2] == (404, "not_found")


def test_an_item_is_referred_to_by_its_id(client: httpx.Client, site: Any) -> None:
    item = ask(client).json()["output"][0]
    for kind in ({"type": "item_reference"}, {}):
        ask(client, input=[{**kind, "id": item["id"]}, {"role": "user", "content": "And?"}])
        assert [message["content"] for message in site.tokenizer.rendered] == [ANSWER, "And?"]
    unknown = [{"type": "item_reference", "id": "msg_x"}]
    assert error(ask(client, input=unknown)) == (404, "not_found", "input[0]")
    assert error(ask(client, input=[{"type": "item_reference"}])) == (400, "invalid_value", "input[0].id")
    assert error(ask(client, previous_response_id=""))[:2] == (404, "not_found")


def test_references_are_bounded_in_what_they_refer_to(make_site: Any) -> None:
    """400 of them to an item of 1 MB took 750 MB."""
    site = make_site(max_body_bytes="100000")
    with site.live() as base_url, httpx.Client(base_url=f"{base_url}/v1", timeout=60) as client:
        item = ask(client).json()["output"][0]
        reply = ask(client, input=[{"type": "item_reference", "id": item["id"]}] * 900)
    assert error(reply) == (400, "invalid_value", "input")
    assert "must have at most 100000 bytes" in reply.json()["error"]["message"]


def test_input_items_are_listed_in_pages(client: httpx.Client) -> None:
    first = ask(client, input="a").json()
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    items = [call, output, {"role": "assistant", "content": "b"}, {"role": "developer", "content": "c"}]
    made = ask(client, input=items, previous_response_id=first["id"]).json()
    path = f"responses/{made['id']}/input_items"
    whole = client.get(path, params={"order": "asc"})
    ResponseItemList.model_validate_json(whole.text, strict=True)
    data = whole.json()["data"]
    types = ["message", "message", "function_call", "function_call_output", "message", "message"]
    assert [item["type"] for item in data] == types
    page = client.get(path, params={"limit": 2, "after": data[4]["id"]}).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == ([data[3]["id"], data[2]["id"]], True)
    assert error(client.get(path, params={"limit": 0})) == (400, "invalid_value", "limit")
    assert error(client.get(path, params={"order": "up"})) == (400, "invalid_value", "order")
    assert error(client.get(path, params={"after": "x"})) == (400, "invalid_value", "after")


def test_input_items_begin_after_a_deleted_response(client: httpx.Client) -> None:
    """They were a 404 of the deleted one, although the response itself was stored."""
    made: list[Any] = [{"id": None}]
    for i in range(4):
        made.append(ask(client, input=f"q{i}", previous_response_id=made[-1]["id"]).json())
    client.delete(f"responses/{made[2]['id']}")
    path = f"responses/{made[4]['id']}/input_items"
    texts = [item["content"][0]["text"] for item in client.get(path, params={"order": "asc"}).json()["data"]]
    assert texts == ["q2", ANSWER, "q3"]
    assert error(ask(client, previous_response_id=made[4]["id"]))[:2] == (404, "not_found")


def test_the_sdk_reads_what_is_stored(site: Any) -> None:
    with site.live() as base_url, openai.OpenAI(base_url=f"{base_url}/v1", api_key="k", max_retries=0) as sdk:
        made = sdk.responses.create(input="Hi", model="alias", background=True)
        assert made.status == "queued"
        until(lambda: sdk.responses.retrieve(made.id).status == "completed")
        assert sdk.responses.retrieve(made.id).output_text == ANSWER
        assert len(list(sdk.responses.input_items.list(made.id))) == 1
        replayed = list(sdk.responses.retrieve(made.id, stream=True, starting_after=2))
        assert (replayed[0].sequence_number, replayed[-1].type) == (3, "response.completed")
        assert sdk.responses.input_tokens.count(model="alias", input="Hi").input_tokens > 2
        sdk.responses.delete(made.id)


def test_a_replay_equals_the_first_stream_byte_for_byte(client: httpx.Client) -> None:
    first = ask(client, background=True, stream=True).content
    events = events_of(first.decode())
    assert [event["type"] for event in events[:3]] == [
        f"response.{name}" for name in ("created", "queued", "in_progress")
    ]
    made = events[-1]["response"]
    assert made == client.get(f"responses/{made['id']}").json()
    for yes in ("true", "True", "1"):
        assert client.get(f"responses/{made['id']}", params={"stream": yes}).content == first
    assert client.get(f"responses/{made['id']}", params={"stream": "0"}).json() == made
    for name in ("stream", "include_obfuscation"):
        assert error(client.get(f"responses/{made['id']}", params={name: "yes"})) == (400, "invalid_value", name)
    rest = client.get(f"responses/{made['id']}", params={"stream": "true", "starting_after": "4"}).content
    assert rest == b"".join(event + b"\n\n" for event in first.split(b"\n\n")[5:-1])
    assert error(client.get(f"responses/{made['id']}", params={"starting_after": "4"}))[2] == "starting_after"
    assert error(client.get(f"responses/{made['id']}", params={"include_obfuscation": "true"}))[0] == 400
    bad = {"stream": "true", "starting_after": "x"}
    assert error(client.get(f"responses/{made['id']}", params=bad))[2] == "starting_after"


def test_the_background_outlives_the_connection(client: httpx.Client, site: Any) -> None:
    goes_on = False
    site.engine.may_go_on = lambda num_read: num_read < 3 or goes_on
    with client.stream("POST", "responses", json={"input": "Hi", "background": True, "stream": True}) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: response.created"
        response_id = next(lines).split('"id":"')[1].split('"')[0]
    until(lambda: client.get(f"responses/{response_id}").json()["status"] == "in_progress")
    assert error(ask(client, previous_response_id=response_id))[2] == "previous_response_id"
    goes_on = True
    until(lambda: client.get(f"responses/{response_id}").json()["status"] == "completed")
    assert site.engine.asked[0].generation.closed.wait(60)


@pytest.mark.parametrize("method", ["cancel", "delete"])
def test_who_cancels_or_deletes_stops_the_engine(client: httpx.Client, site: Any, method: str) -> None:
    """Before the answer: while there was no text, it took up to 5 s."""
    site.engine.may_go_on = lambda num_read: num_read < 3
    made = ask(client, background=True).json()
    if method == "cancel":
        assert client.post(f"responses/{made['id']}/cancel").json()["status"] == "cancelled"
    else:
        client.delete(f"responses/{made['id']}")
    assert site.engine.asked[0].generation.closed.is_set()
    until(lambda: site.app.state.lifecycle.num_active == 0)
    assert client.get(f"responses/{made['id']}").status_code == (200 if method == "cancel" else 404)


def test_another_process_cancels(client: httpx.Client, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BEAT_EVERY_S", 1e9)
    site.engine.may_go_on = lambda num_read: num_read < 3
    made = ask(client, background=True).json()
    write(site, lambda transaction: cancel(transaction, made["id"], ""))
    assert site.engine.asked[0].generation.closed.wait(60)


def test_a_cancelled_response_ends_as_its_stream_does(client: httpx.Client, site: Any) -> None:
    """The replay had no last event, and what was written stayed in progress, without its text."""
    site.engine.may_go_on = lambda num_read: num_read < 3
    made = ask(client, background=True).json()
    until(lambda: site.engine.asked[0].generation.num_read == 3)
    ended = client.post(f"responses/{made['id']}/cancel").json()
    assert ended == client.get(f"responses/{made['id']}").json()
    assert ended == client.post(f"responses/{made['id']}/cancel").json()
    events = events_of(client.get(f"responses/{made['id']}", params={"stream": "true"}).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[-1]["type"], events[-1]["response"]) == ("response.incomplete", ended)
    assert (ended["status"], ended["output"][0]["status"]) == ("cancelled", "incomplete")
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert ended["output"][0]["content"][0]["text"] == said != ""


def test_who_follows_a_response_that_is_deleted_is_told(client: httpx.Client, site: Any) -> None:
    """By an error with the number 0, to which who resumes would have gone back."""
    site.engine.may_go_on = lambda num_read: num_read < 3
    made = ask(client, background=True).json()
    with client.stream("GET", f"responses/{made['id']}", params={"stream": "true"}) as replay:
        texts = replay.iter_text()
        begun = next(texts)
        write(site, lambda transaction: transaction.delete(RESPONSE, made["id"], ""))
        events = events_of(begun + "".join(texts))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "not_found")


def test_only_the_background_is_cancelled_and_replayed(client: httpx.Client) -> None:
    made = ask(client).json()
    assert client.post(f"responses/{made['id']}/cancel").status_code == 400
    assert error(client.get(f"responses/{made['id']}", params={"stream": "true"}))[2] == "stream"
    assert error(ask(client, background=True, store=False))[2] == "background"
    assert client.post("responses/resp_x/cancel").status_code == 404


def test_a_failure_in_the_background_is_told(client: httpx.Client, site: Any) -> None:
    site.engine.error, site.engine.error_after = EngineDiedError(), 3
    made = ask(client, background=True).json()
    until(lambda: client.get(f"responses/{made['id']}").json()["status"] == "failed")
    replay = client.get(f"responses/{made['id']}", params={"stream": "true"}).text
    assert events_of(replay)[-1]["type"] == "response.failed"


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_nothing_stays_in_progress_for_ever(client: httpx.Client, site: Any, is_cancelled: bool) -> None:
    """Whoever read a response of a dead process wrote it, which a full disk refused; its replay had no end."""
    made = ask(client, background=True).json()
    until(lambda: client.get(f"responses/{made['id']}").json()["status"] == "completed")

    def leave(transaction: Transaction) -> None:
        stored = load_response(transaction, made["id"], "")
        stored.response["status"] = stored.response["output"][0]["status"] = "in_progress"
        transaction.put(stored.row(""))
        if is_cancelled:
            cancel(transaction, made["id"], "")
        connection = transaction._connection
        connection.execute("DELETE FROM events WHERE number > 5")
        connection.execute("UPDATE objects SET used = used - ?", (DEAD_AFTER_S + 1,))

    write(site, leave)
    store = site.app.state.context.store
    for line in (store._reader, store._writer):
        line.connection.execute("PRAGMA query_only = ON")
    found = client.get(f"responses/{made['id']}").json()
    status, kind, code = ("cancelled", "incomplete", None) if is_cancelled else ("failed", "failed", "server_error")
    assert (found["status"], (found["error"] or {}).get("code")) == (status, code)
    assert found["output"][0]["status"] == "incomplete"
    assert client.get(f"responses/{made['id']}/input_items").status_code == 200
    events = events_of(client.get(f"responses/{made['id']}", params={"stream": "true"}).text)
    assert [event["sequence_number"] for event in events] == list(range(7))
    assert (events[-1]["type"], events[-1]["response"]) == (f"response.{kind}", found)
    after = {"stream": "true", "starting_after": 6}
    assert client.get(f"responses/{made['id']}", params=after).text == ""


def test_a_follower_reads_nothing_but_new_events(site: Any) -> None:
    """Five times a second it read the whole response, in a transaction that kept all others from writing."""
    context, statements = site.app.state.context, list[str]()
    head = {"id": "resp_1", "status": "in_progress", "background": True, "previous_response_id": None, "output": []}
    row = StoredResponse(head, []).row("")
    write(site, lambda transaction: (transaction.put(row), transaction.append_events(row, 0, [b"a", b"b"])))
    asyncio.run(context.store.read(lambda transaction: None))
    for line in (context.store._reader, context.store._writer):
        line.connection.set_trace_callback(statements.append)
    last = b"event: response.completed\n"

    async def read() -> list[bytes]:
        events = follow(context, "resp_1", "", 0)
        found = [await anext(events)]
        waiting = asyncio.ensure_future(anext(events))
        while sum("BEGIN" in statement for statement in statements) < 3:
            await asyncio.sleep(0.01)
        assert not [each for each in statements if "IMMEDIATE" in each or "data, parent" in each]
        await context.store.write(lambda transaction: transaction.append_events(row, 2, [last]))
        return [*found, await waiting, *[event async for event in events]]

    assert asyncio.run(read()) == [b"b", last]


def test_a_client_that_leaves_frees_the_engine_and_stores_nothing(client: httpx.Client, site: Any) -> None:
    site.engine.may_go_on = lambda num_read: num_read < 3
    with client.stream("POST", "responses", json={"input": "Hi", "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        response_id = next(lines).split('"id":"')[1].split('"')[0]
    assert site.engine.asked[0].generation.closed.wait(60)
    assert client.get(f"responses/{response_id}").status_code == 404


def test_silence_is_filled_with_comments(make_site: Any) -> None:
    """The engine is silent until its client has seen one."""
    site, seen = make_site(sse_ping_s=0.05), threading.Event()
    site.engine.may_go_on = lambda num_read: num_read < 3 or seen.is_set()
    with site.live() as base_url:
        for body in ({"store": False}, {}, {"background": True}):
            seen.clear()
            asked = {"input": "Hi", "stream": True, **body}
            with httpx.stream("POST", f"{base_url}/v1/responses", json=asked, timeout=60) as reply:
                for line in reply.iter_lines():
                    if line == ": ping":
                        seen.set()
            assert seen.is_set()


def test_one_key_does_not_see_the_responses_of_another(make_site: Any) -> None:
    site = make_site(api_key=("a", "b"))
    keys = [{"Authorization": f"Bearer {key}"} for key in "ab"]
    with site.live() as base_url, httpx.Client(base_url=f"{base_url}/v1", timeout=60) as client:
        made = client.post("responses", json={"input": "Hi"}, headers=keys[0]).json()
        assert [client.get(f"responses/{made['id']}", headers=key).status_code for key in keys] == [200, 404]
        body = {"input": "Hi", "previous_response_id": made["id"]}
        assert [client.post("responses", json=body, headers=key).status_code for key in keys] == [200, 404]


def test_encrypted_reasoning_comes_back(make_site: Any) -> None:
    site = make_site()
    site.tokenizer.template, site.tokenizer.added_ids = QWEN3, {"<think>": 300, "</think>": 301}
    site.rebuild()
    site.engine.answers = [f"{THOUGHT}Look.\n{CALL}"]
    with site.live() as base_url, httpx.Client(base_url=f"{base_url}/v1", timeout=60) as client:
        include = ["reasoning.encrypted_content"]
        item = ask(client, include=include, tools=[WEATHER], store=False).json()["output"][0]
        assert "well" not in item["encrypted_content"]
        bare = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": item["encrypted_content"]}
        said = [{"role": "user", "content": "Hi"}, bare, {"role": "assistant", "content": "Look."}]
        assert ask(client, input=said).status_code == 200
        assert site.tokenizer.rendered[1]["reasoning_content"] == "well"
        for text in (item["encrypted_content"][:-8] + "AAAAAAA=", "x", "é", ""):
            said[1] = {**bare, "encrypted_content": text}
            reply = ask(client, input=said)
            assert reply.headers.get("x-ignored-params") == ("input[1].encrypted_content" if text else None)
            assert all("reasoning_content" not in turn for turn in site.tokenizer.rendered)


def test_tokens_of_an_input_are_counted_as_they_are_used(client: httpx.Client) -> None:
    body = {"input": "Hällo", "instructions": "i"}
    counted = client.post("responses/input_tokens", json=body).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": counted["input_tokens"]}
    made = ask(client, **body).json()
    assert counted["input_tokens"] == made["usage"]["input_tokens"]
    more = client.post("responses/input_tokens", json={"input": "x", "previous_response_id": made["id"]}).json()
    assert more["input_tokens"] > counted["input_tokens"]


@pytest.mark.slow
def test_ten_thousand_responses_stay_within_their_bounds(make_site: Any) -> None:
    site = make_site(store_max_objects=1000, store_max_bytes=4_000_000)
    store = site.app.state.context.store

    async def fill() -> list[Any]:
        for i in range(10_000):
            head = {"id": f"resp_{i}", "status": "completed", "output": [{"text": "x" * 2000}]}
            row = StoredResponse(head, []).row("")
            await store.write(lambda transaction, row=row: transaction.put(row))
        return list(await store.read(lambda transaction: transaction.of_kind(RESPONSE)))

    kept = asyncio.run(fill())
    assert 500 < len(kept) <= 1000
    assert kept[-1].id == "resp_9999"
    with contextlib.closing(store):
        assert sum(path.stat().st_size for path in store.folder.iterdir()) < 16_000_000
