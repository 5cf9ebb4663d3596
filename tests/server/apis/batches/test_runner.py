"""/v1/batches with the OpenAI SDK over a fake engine, what may fail, the faults of an input, and the journal."""

import dataclasses
import errno
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from weft.engine.wire.params import BACKGROUND
from weft.server.apis.batches import line_run, runner
from weft.server.apis.batches import runner as batch_run
from weft.server.apis.batches.line_run import Slots
from weft.server.apis.batches.lines import ENDED, MAX_LINES, Journal, check_input
from weft.server.errors import ModelFailedError, QueueFullError
from weft.server.task.body import MAX_PARTS

CHAT = "/v1/chat/completions"


@pytest.fixture
def site(make_site: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    monkeypatch.setattr(runner, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(batch_run, "WATCH_S", 0.05)
    monkeypatch.setattr(line_run, "ROOM_PAUSE_S", 0.05)
    site = make_site(data_dir=str(tmp_path), api_key=("a", "b"), batch_lines=3)
    yield site
    site.app.state.context.store.close()


@pytest.fixture
def client(site: Any) -> Iterator[openai.OpenAI]:
    with site.live() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="a", max_retries=0) as client:
        yield client


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def begin(client: openai.OpenAI, *lines: Any, **options: Any) -> Any:
    content = "".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines)
    file = client.files.create(file=("in.jsonl", content.encode()), purpose="batch")
    given: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **options}
    return client.batches.create(**given)


def ended(client: openai.OpenAI, batch: Any) -> Any:
    deadline = time.monotonic() + 60
    while (found := client.batches.retrieve(batch.id)).status not in ENDED:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def results(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    assert len({entry["id"] for entry in lines}) == len(lines)
    return {entry["custom_id"]: entry for entry in lines}


def test_a_batch_is_answered_into_files(client: openai.OpenAI, site: Any) -> None:
    lines = [line(f"r{i}", max_tokens=3) for i in range(10)]
    batch = begin(client, *lines, line("bad", max_tokens=-1), metadata={"a": "b"})
    assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
    batch = ended(client, batch)
    assert (batch.status, batch.errors) == ("completed", None)
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (11, 10, 1)
    assert batch.usage.output_tokens == 30
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    answers = results(client, batch.output_file_id)
    assert sorted(answers) == sorted(f"r{i}" for i in range(10))
    response = answers["r1"]["response"]
    assert (response["status_code"], answers["r1"]["error"]) == (200, None)
    assert response["request_id"].startswith("req_")
    assert ChatCompletion.model_validate(response["body"]).choices[0].finish_reason == "length"
    (failure,) = results(client, batch.error_file_id).values()
    assert (failure["custom_id"], failure["error"]["line"], failure["response"]["status_code"]) == ("bad", 11, 400)
    assert "max_tokens must be at least 1, got -1" in failure["error"]["message"]
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert {asked.priority for asked in site.engine.asked} == {BACKGROUND}
    assert [found.id for found in client.batches.list(limit=1)] == [batch.id]
    stranger = client.with_options(api_key="b")
    assert list(stranger.batches.list()) == []
    for act in (stranger.batches.retrieve, stranger.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            act(batch.id)


def test_a_client_cannot_say_that_it_is_a_batch(site: Any) -> None:
    headers, body = {"weft.batch_tenant": "x", "x-weft-batch-tenant": "x"}, line("x")["body"]
    assert site.call("POST", CHAT, json=body, headers=headers).status == 401
    assert site.call("POST", CHAT, json=body, headers={**headers, "authorization": "Bearer a"}).status == 200
    assert site.engine.asked[-1].priority == 0


def test_an_input_with_faults_fails_and_names_the_lines(client: openai.OpenAI) -> None:
    wrong = [
        line("a"),
        "no json",
        line("a"),
        line("b", url="/v1/completions"),
        {**line("c"), "method": "GET"},
        line("d", stream=True),
        line("d2", background=True),
        {**line("e"), "body": []},
        line(""),
    ]
    batch = ended(client, begin(client, *wrong))
    assert batch.status == "failed"
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_url"),
        (5, "invalid_method"),
        (6, "invalid_body"),
        (7, "invalid_body"),
        (8, "invalid_body"),
        (9, "invalid_custom_id"),
    ]
    assert ended(client, begin(client)).errors.data[0].code == "empty_file"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "/v1/nope"}, "endpoint must be one of /v1/chat/completions, "),
        ({"endpoint": "/v1/embeddings"}, "/v1/decisions, /v1/systemone for this server, got '/v1/embeddings'"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-nobody"}, "no such file: 'file-nobody'"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata must have at most 16 members, got 17"),
        ({"metadata": {"a": "x" * 513}}, "values at most 512, got 'a'"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
def test_a_wrong_field_begins_nothing(client: openai.OpenAI, options: Any, message: str) -> None:
    with pytest.raises(openai.APIStatusError, match=message):
        begin(client, line("a"), **options)
    assert list(client.batches.list()) == []


def test_a_batch_is_cancelled_and_keeps_what_is_done(client: openai.OpenAI, site: Any) -> None:
    site.engine.may_go_on = lambda num_read: len(site.engine.asked) <= 4
    batch = begin(client, *(line(f"r{i}") for i in range(20)))
    deadline = time.monotonic() + 60
    while client.batches.retrieve(batch.id).request_counts.completed == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    done, undone = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert len(done) + len(undone) == 20 and not done.keys() & undone.keys()
    assert {entry["error"]["code"] for entry in undone.values()} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError, match="it is cancelled"):
        client.batches.cancel(batch.id)


def test_a_batch_expires(client: openai.OpenAI, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.server.apis.batches.route.WINDOW_S", 1)
    site.engine.may_go_on = lambda num_read: False
    batch = ended(client, begin(client, line("a")))
    assert batch.status == "expired"
    assert results(client, batch.error_file_id)["a"]["error"]["code"] == "batch_expired"


def test_a_busy_server_is_asked_again(client: openai.OpenAI, site: Any) -> None:
    site.engine.refuse = QueueFullError("full")
    batch = begin(client, line("a"))
    while client.batches.retrieve(batch.id).status == "validating":
        time.sleep(0.02)
    time.sleep(0.2)
    site.engine.refuse = None
    assert ended(client, batch).request_counts.completed == 1


def test_a_model_that_cannot_be_loaded_ends_its_line(client: openai.OpenAI, site: Any) -> None:
    site.engine.refuse = ModelFailedError("no weights")
    batch = ended(client, begin(client, line("a")))
    assert results(client, batch.error_file_id)["a"]["error"]["code"] == "model_failed"


def test_a_full_disk_delays_results_and_loses_none(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, write = [True, False, True], os.write

    def half(file: int, data: bytes) -> int:
        if data.startswith(b'{"id":"batch_req_') and faults and faults.pop():
            write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr("weft.server.apis.batches.lines.os.write", half)
    batch = ended(client, begin(client, *(line(f"r{i}") for i in range(5))))
    assert not faults
    assert sorted(results(client, batch.output_file_id)) == [f"r{i}" for i in range(5)]


def test_what_nobody_foresaw_fails_one_batch(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(batch_run.batch_lines, "check_input", lambda *_: {}["nothing"])
        batch = ended(client, begin(client, line("a")))
    assert (batch.status, [error.code for error in batch.errors.data]) == ("failed", ["internal_error"])
    assert "KeyError: 'nothing'" in caplog.text
    assert ended(client, begin(client, line("a"))).status == "completed"


def test_what_nobody_foresaw_fails_one_line(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    call = line_run.call

    async def broken(app: Any, path: str, body: bytes, tenant: str) -> Any:
        reply = await call(app, path, body, tenant)
        assert b"break" not in body
        return dataclasses.replace(reply, body=b'{"half":') if b"halve" in body else reply

    monkeypatch.setattr(line_run, "call", broken)
    batch = ended(client, begin(client, line("a"), line("b", user="break"), line("c", user="halve")))
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 2)
    failures = results(client, batch.error_file_id)
    assert {name: entry["error"]["line"] for name, entry in failures.items()} == {"b": 2, "c": 3}
    assert failures["b"]["response"] is None


def test_results_beyond_the_bound_of_files_end_the_batch(client: openai.OpenAI, site: Any) -> None:
    bounds = site.app.state.context.store._bounds
    site.app.state.context.store._bounds = dataclasses.replace(bounds, max_kept_bytes=8000)
    site.engine.may_go_on = lambda num_read: len(site.engine.asked) <= 8
    batch = ended(client, begin(client, *(line(f"r{i}") for i in range(20))))
    assert (batch.status, [error.code for error in batch.errors.data]) == ("failed", ["storage_full"])
    assert "files_max_bytes" in batch.errors.data[0].message
    assert len(results(client, batch.output_file_id)) == batch.request_counts.completed > 0
    with pytest.raises(openai.InternalServerError, match="delete some first"):
        client.files.create(file=("more", b"x"), purpose="user_data")
    assert client.files.delete(batch.input_file_id).deleted  # though the others are beyond the bound still


def test_a_full_disk_at_the_end_is_told_once(
    client: openai.OpenAI, site: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(batch_run.os, "link", fail)
        batch = ended(client, begin(client, line("a")))
    assert (batch.status, batch.output_file_id, batch.request_counts.completed) == ("failed", None, 1)
    first, second = batch.errors.data
    assert (first.code, second.code) == ("storage_full", "storage_full")
    assert f"stay in batches/{batch.id}.answers" in second.message
    assert b'"custom_id":"a"' in (tmp_path / "batches" / f"{batch.id}.answers").read_bytes()


def test_an_input_that_is_deleted_fails_a_batch_that_goes_on(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(path: pathlib.Path, *_: object) -> Any:
        path.unlink()
        return 3, None, []

    monkeypatch.setattr(batch_run.batch_lines, "check_input", vanish)
    batch = ended(client, begin(client, line("a")))
    assert (batch.status, [error.code for error in batch.errors.data]) == ("failed", ["no_input"])


def test_tenants_take_turns(client: openai.OpenAI, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line ends at a time, so that whoever gets its place is decided by nothing but the lines running."""
    asking, take, may_end = set(), Slots.take, threading.Semaphore(0)

    async def noted(slots: Slots, batch: Any) -> None:
        asking.add(batch.source.tenant)
        await take(slots, batch)

    def has_asked(count: int) -> Callable[[], bool]:
        return lambda: len(site.engine.asked) == count

    monkeypatch.setattr(Slots, "take", noted)
    site.engine.may_go_on = lambda _: may_end.acquire(blocking=False)
    other = client.with_options(api_key="b")
    lines = [line(f"r{i}", max_tokens=1) for i in range(12)]
    batches = [begin(client, *lines)]
    wait_until(has_asked(3))
    batches.append(begin(other, *lines))
    wait_until(lambda: len(asking) == 2)
    for count in range(4, 12):
        may_end.release()
        wait_until(has_asked(count))
        running = [asked.request.tenant for asked in site.engine.asked if not asked.generation.num_read]
        assert len(running) == 3
        assert set(running) == asking
    may_end.release(24)
    assert [ended(client, batches[0]).status, ended(other, batches[1]).status] == ["completed", "completed"]


def test_a_journal_cuts_half_a_line(tmp_path: pathlib.Path) -> None:
    paths = (tmp_path / "answers", tmp_path / "errors")
    whole = b'{"id":"batch_req_x_7","response":{"body":{"usage":{"prompt_tokens":3,"completion_tokens":4}}}}\n'
    paths[0].write_bytes(whole + whole[:30])
    journal = Journal(paths)
    assert (journal.done, journal.counts, journal.usage.shown()["total_tokens"]) == ({7}, [1, 0], 7)
    journal.append([b'{"id":"batch_req_x_8"}\n'], is_error=True)
    for broken in (b'{"id":\n', b'{"id":\n"batch_req_x_9"}\n', b'{"id":"batch_req_x_9"}'):
        with pytest.raises(ValueError):
            journal.append([broken], is_error=True)
    journal.close()
    assert paths[0].read_bytes() == whole
    assert paths[1].read_bytes() == b'{"id":"batch_req_x_8"}\n'


@pytest.mark.parametrize(
    "damage",
    [
        b"\x00" * 40 + b"\n",
        b'{"id":"x"}\n',
        b"[]\n",
        b"\xff\n",
        b"{}\n",
        b'{"id":"a_1","response":null}\n',
        b"[" * 9000 + b"\n",
    ],
)
def test_a_journal_is_done_again_from_where_it_is_damaged(tmp_path: pathlib.Path, damage: bytes) -> None:
    """The batch ended with an internal error, and with it what was answered."""
    paths = (tmp_path / "answers", tmp_path / "errors")
    lines = [b'{"id":"batch_req_x_%d","response":{"body":{"usage":{"prompt_tokens":3}}}}\n' % i for i in range(3)]
    paths[0].write_bytes(lines[0] + damage + lines[2])
    journal = Journal(paths)
    journal.close()
    assert (journal.done, journal.counts, journal.num_bytes) == ({0}, [1, 0], len(lines[0]))
    assert paths[0].read_bytes() == lines[0]


def test_a_batch_has_bounds(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"".join(json.dumps(line(str(i))).encode() + b"\n" for i in range(MAX_LINES + 1)))
    count, _, errors = check_input(path, CHAT, 1000)
    assert (count, [error["code"] for error in errors]) == (MAX_LINES + 1, ["too_many_lines"])
    path.write_text(json.dumps(line("a", user="x" * 2000)) + "\n\n" + json.dumps(line("b", model="m")))
    count, model, errors = check_input(path, CHAT, 1000)
    assert (count, model, [(error["line"], error["code"]) for error in errors]) == (2, "m", [(1, "line_too_long")])
    path.write_text(json.dumps(line("a", x=[[]] * (MAX_PARTS + 1))))
    assert "texts, lists and objects" in check_input(path, CHAT, 1 << 30)[2][0]["message"]


def test_the_runner_sweeps(client: openai.OpenAI, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each upload did it, at a cost that grew with the number of files."""
    monkeypatch.setattr(runner, "SWEEP_S", 0.1)
    kept = client.files.create(file=("f", b"x"), purpose="batch").id
    for name in ("first", "part_left"):  # the sweep of the first may have begun before there was a file to keep
        left = tmp_path / "files" / name
        left.touch()
        os.utime(left, (1, 1))
        deadline = time.monotonic() + 30
        while left.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.utime(tmp_path / "files" / kept, (1, 1))
    assert [path.name for path in (tmp_path / "files").iterdir()] == [kept]


def test_a_damaged_input_ends_the_batch(client: openai.OpenAI, tmp_path: pathlib.Path) -> None:
    content = json.dumps(line("a")).encode() + b"\n"
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    (tmp_path / "files" / file.id).write_bytes(content.replace(b"Hi", b"Ho"))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")  # type: ignore[arg-type]
    batch = ended(client, batch)
    assert batch.status == "failed" and "is damaged" in batch.errors.data[0].message
