"""The glue, around a fake model and without its endless loop."""

import io
import logging
import pathlib
from collections.abc import Iterator
from typing import Any, Protocol
from unittest.mock import MagicMock

import msgspec
import pytest
import torch

from tests.engine.fake_runner import make_engine
from tests.engine.guidance.demo import guided
from tests.engine.guidance.slow_compiler import SlowCompiler
from tests.engine.requests_for_tests import add_request
from weft.engine import process
from weft.engine.guidance.compiler import InvalidGrammarError
from weft.engine.loop.crash_record import CrashRecord, fingerprint
from weft.engine.loop.engine import Engine
from weft.engine.loop.grammars import PendingGrammars
from weft.engine.memory_plan import MemoryPlan
from weft.engine.process import EngineProcess
from weft.engine.request import Outputs
from weft.engine.schedule.scheduler import ScheduledStep
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import (
    AbortRequest,
    Accepted,
    AddRequest,
    BeamOptions,
    EngineInfo,
    EngineOptions,
    FromEngine,
    Rejected,
    RejectReason,
)
from weft.engine.wire.status_page import Status, StatusPage

INFO = EngineInfo("epoch", "Fake", 50, 128, (), "cpu", "float32", "fake", 4, 64, 8, 64)


class Start(Protocol):
    def __call__(self, *, overlap: bool = False, stall_timeout_s: float = 120.0) -> EngineProcess: ...


class FakeStarted:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.info = INFO
        self.plan = MemoryPlan(1, 1, 1, 64, 4, 128, 8)
        self.tier = self.events = None


@pytest.fixture
def start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts an engine process in the runtime directory; the one before it counts as dead."""
    started: list[EngineProcess] = []

    def start(*, overlap: bool = False, stall_timeout_s: float = 120.0) -> EngineProcess:
        fake = make_engine(overlap=overlap)

        def fake_start(options: EngineOptions, epoch: str, *, before_launch: object, **_: object) -> FakeStarted:
            fake.engine._before_launch = before_launch  # type: ignore[assignment]
            return FakeStarted(fake.engine)

        monkeypatch.setattr(process, "start", fake_start)
        started.append(EngineProcess(tmp_path, EngineOptions(model="fake", stall_timeout_s=stall_timeout_s)))
        return started[-1]

    yield start
    for p in started:
        p._link._selector.close()
        p._link._listener.close()


def step(p: EngineProcess) -> Outputs:
    outputs = p._engine.step()
    p._forget_ended(outputs)
    return outputs


def suspects(tmp_path: pathlib.Path, *prompts: list[int]) -> list[bool]:
    """Which prompts the next engine process would suspect."""
    record = CrashRecord(tmp_path)
    return [record.is_suspect(fingerprint(add_request(prompt))) for prompt in prompts]


def test_the_requests_of_a_step_are_on_record_while_it_runs(start: Start, tmp_path: pathlib.Path) -> None:
    p = start()
    p._apply(0, add_request([1, 2], 0))
    p._apply(0, add_request([3], 1))
    step(p)
    assert suspects(tmp_path, [1, 2], [3], [4]) == [True, True, False]


def test_a_step_that_still_runs_is_on_record_beside_the_next_one(start: Start, tmp_path: pathlib.Path) -> None:
    """Only the step launched last was written, so whoever ended with the one before it was never suspect."""
    p = start(overlap=True)
    p._apply(0, add_request([1, 2], 0, max_tokens=1))
    step(p)
    p._apply(0, add_request([3], 1))
    recorded = []
    before_launch = p._write_suspects
    p._engine._before_launch = lambda s: (before_launch(s), recorded.append(p._record._read_step()))
    step(p)
    assert recorded == [[fingerprint(add_request([1, 2], max_tokens=1)), fingerprint(add_request([3]))]]


def test_a_suspect_runs_alone_and_is_cleared_at_its_end(start: Start, tmp_path: pathlib.Path) -> None:
    p = start()
    p._apply(0, add_request([1, 2], 0, max_tokens=2))
    step(p)
    p = start()
    p._apply(0, add_request([1, 2], 0, max_tokens=2))
    p._apply(0, add_request([3], 1))
    mark = fingerprint(add_request([1, 2], max_tokens=2))
    assert [o.request_id for _, o in step(p)] == [0]
    assert p._record.is_suspect(mark)
    assert [o.request_id for _, o in step(p)] == [0]
    assert not p._record.is_suspect(mark)
    assert list(p._fingerprints) == [(0, 1)]


def test_a_suspect_that_is_aborted_before_it_runs_stays_suspect(start: Start) -> None:
    """A client that gave up waiting cleared its request, which then ran beside others again."""
    p = start()
    p._apply(0, add_request([1, 2], 0))
    step(p)
    p = start()
    p._apply(0, add_request([1, 2], 0))
    p._apply(0, AbortRequest(0))
    step(p)
    assert p._record.is_suspect(fingerprint(add_request([1, 2])))
    assert p._fingerprints == {}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_suspect_that_its_server_ends_by_a_stop_string_is_cleared(start: Start, overlap: bool) -> None:
    """It never was, so that all that compute the same ran one after the other, for ever."""
    p = start(overlap=overlap)
    p._apply(0, add_request([1, 2], 0))
    step(p)
    p = start(overlap=overlap)
    for number in range(3):
        p._apply(0, add_request([1, 2], number))
    while (0, 0) not in p._have_run:
        step(p)
    mark = fingerprint(add_request([1, 2]))
    assert p._record.is_suspect(mark), "it still runs"
    p._apply(0, AbortRequest(0))
    step(p)
    assert not p._record.is_suspect(mark)
    assert (0, 0) not in p._have_run
    p._apply(0, add_request([1, 2], 3))
    assert not list(p._engine.scheduler.waiting)[-1].runs_alone


SEARCH = msgspec.structs.replace(add_request([1, 2], 0, num_choices=2), beams=BeamOptions())


@pytest.mark.parametrize("add", [SEARCH, add_request([1] * 100, 0)], ids=["search", "prompt"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_suspect_that_is_aborted_before_it_gained_anything_has_run_all_the_same(
    start: Start, add: AddRequest, overlap: bool
) -> None:
    """A search that is aborted before its end stayed suspect, as did a prompt of which a part was computed."""
    p = start(overlap=overlap)
    p._apply(0, add)
    step(p)
    p = start(overlap=overlap)
    p._apply(0, add)
    assert not step(p)
    assert p._record.is_suspect(fingerprint(add))
    p._apply(0, AbortRequest(0))
    step(p)
    assert not p._record.is_suspect(fingerprint(add))
    assert (p._fingerprints, p._have_run, p._left) == ({}, set(), set())


def test_who_has_ended_is_on_record_as_long_as_it_is_on_the_device(start: Start) -> None:
    """The launch behind the step in which it ended dropped it, while the step after that one still ran."""
    p = start(overlap=True)
    p._apply(0, add_request([1, 2], 0, max_tokens=50, stop_token_ids=tuple(range(50))))
    p._apply(0, add_request([3], 1))
    recorded, before_launch = [], p._before_launch

    def check(launched: ScheduledStep) -> None:
        before_launch(launched)
        on_device = {s.request.key[:2] for s in (*launched.requests, *p._engine.launched_steps[0].requests)}
        recorded.append((len(on_device), len(p._record._read_step())))

    step(p)
    p._engine._before_launch = check
    for _ in range(3):
        step(p)
    assert recorded == [(2, 2), (2, 2), (1, 1)]


def test_a_request_that_kills_two_engines_is_rejected_as_poison(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        p = start()
        p._apply(0, add_request([1, 2], 0))
        step(p)
    p = start()
    sent: list[object] = []
    monkeypatch.setattr(p._link, "put", lambda connection, message: sent.append(message.reason))
    p._apply(0, add_request([1, 2], 0))
    assert sent == [RejectReason.POISON]
    assert not p._engine.has_work


def test_a_server_that_goes_takes_its_requests_along(start: Start) -> None:
    p = start()
    p._apply(0, add_request([1, 2], 0))
    p._apply(1, add_request([3], 0))
    step(p)
    p._apply(0, None)
    assert [key.connection for key in p._engine.scheduler.requests] == [1]


def test_a_request_is_answered_when_its_grammar_is_compiled(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = SlowCompiler()
    p = start()
    p._engine.pending.grammars = PendingGrammars(compiler)  # type: ignore[arg-type]
    sent: list[FromEngine] = []
    monkeypatch.setattr(p._link, "put", lambda connection, message: sent.append(message))
    p._apply(0, guided(add_request([1], 0), "good"))
    p._apply(0, guided(add_request([1], 1), "bad"))
    p._answer_ready()
    assert (sent, len(p._fingerprints)) == ([], 2)
    compiler.finish("good")
    compiler.futures["bad"].set_exception(InvalidGrammarError("wrong at 3"))
    p._answer_ready()
    assert sent == [Accepted(0), Rejected(1, RejectReason.GRAMMAR, "wrong at 3")]
    step(p)
    assert list(p._fingerprints) == [(0, 0)]


def test_a_grammar_on_which_the_engine_dies_is_suspect(start: Start, tmp_path: pathlib.Path) -> None:
    p = start()
    p._engine.pending.grammars = PendingGrammars(SlowCompiler())  # type: ignore[arg-type]
    add = guided(add_request([1], 0), "deadly")
    p._apply(0, add)
    record = CrashRecord(tmp_path)
    assert record.is_suspect(fingerprint(add))
    assert not record.is_suspect(fingerprint(add_request([1], 0)))


def test_the_next_grammar_to_be_compiled_is_on_record(start: Start) -> None:
    compiler = SlowCompiler()
    p = start()
    p._engine.pending.grammars = PendingGrammars(compiler)  # type: ignore[arg-type]
    adds = [guided(add_request([1], number), str(number)) for number in range(8)]
    for add in adds:
        p._apply(0, add)
    assert p._record._read_step() == list(map(fingerprint, adds[:6]))
    compiler.finish("0")
    p._answer_ready()
    assert p._record._read_step() == list(map(fingerprint, adds[1:7]))


def test_the_status_page_says_how_the_engine_is(start: Start, tmp_path: pathlib.Path) -> None:
    p = start()
    p._apply(0, add_request([1] * 9, 0, max_tokens=2))
    step(p)
    p._write_status()
    status = StatusPage(tmp_path / "status").read()
    assert (status.is_ready, status.has_work, status.num_requests_running) == (1, 1, 1)
    assert (status.num_blocks, status.num_used_blocks, status.num_cached_blocks) == (63, 3, 2)
    assert (status.prompt_tokens, status.generation_tokens, status.num_steps) == (9, 1, 1)
    assert (status.prefill_tokens, status.decode_tokens) == (9, 0)
    step(p)
    p._write_status()
    assert StatusPage(tmp_path / "status").read().decode_tokens == 1


def test_the_page_says_how_far_loading_is_and_the_log_now_and_then(
    start: Start, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = start()
    page = StatusPage(tmp_path / "status")
    page.write(Status(epoch_id=7))
    caplog.set_level(logging.INFO)
    caplog.clear()
    p._show_progress(1_000_000, 4_000_000)
    status = page.read()
    assert (status.epoch_id, status.loaded_bytes, status.total_bytes) == (7, 1_000_000, 4_000_000)
    assert status.progress_time > 0
    assert caplog.messages == []
    monkeypatch.setattr(process, "_LOG_EVERY_S", 0.0)
    p._show_progress(2_000_000, 4_000_000)
    assert caplog.messages == ["loading weights: 2 of 4 MB"]


def test_idle_time_is_counted_anew_after_work(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop waits as long as `prepare` says, tells it how long nobody asked, and begins again behind a request."""
    p = start()
    now = 100.0
    monkeypatch.setattr("weft.engine.process.time.monotonic", lambda: now)
    monkeypatch.setattr(p._link, "put", lambda *_: None)
    monkeypatch.setattr(p._link, "put_outputs", lambda *_: None)
    idle: list[float] = []

    def prepare(idle_for_s: float) -> float | None:
        idle.append(idle_for_s)
        return 2 - idle_for_s if idle_for_s < 2 else None

    monkeypatch.setattr(p._engine, "prepare", prepare)
    arrivals = iter([[], [], [(0, add_request([1], max_tokens=2))], *[[]] * 6])
    timeouts: list[float | None] = []

    class StopError(Exception):
        """The loop has no end of its own."""

    def poll(timeout: float | None) -> list[tuple[int, object]]:
        nonlocal now
        timeouts.append(timeout)
        now += 0.25 if timeout is None else timeout
        messages = next(arrivals, None)
        if messages is None:
            raise StopError
        return messages

    monkeypatch.setattr(p._link, "poll", poll)
    with pytest.raises(StopError):
        p.run()
    assert idle == [0.0, 1.0, 0.0, 1.0, 2.0]
    assert timeouts == [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0], "with a sign of life every second"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ModelError("no such folder"), "no such folder"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "CUDA out of memory."),
        (RuntimeError("CUDA error: out of memory\nSearch for"), "CUDA error: out of memory"),
        (RuntimeError("wrong shape"), None),
    ],
    ids=str,
)
def test_one_line_says_why_a_model_cannot_be_loaded(
    error: Exception,
    line: str | None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any) -> None:
        raise error

    options = msgspec.json.encode(EngineOptions(model="fake"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(options)))
    monkeypatch.setattr(process, "EngineProcess", refuse)
    for name in ("follow_parent", "logs"):  # what it makes of its own process
        monkeypatch.setattr(process, name, MagicMock())
    if line is None:
        with pytest.raises(RuntimeError, match="wrong shape"):
            process.main(tmp_path)
    else:
        assert process.main(tmp_path) == process.EXIT_CANNOT_LOAD
        assert capsys.readouterr().err == f"weft: error: {line}\n"


def test_what_the_engine_says_of_its_silence(start: Start, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """While it loads it is not judged; then as its step is predicted to take, and without work at least as long."""
    monkeypatch.setattr("weft.engine.process.time.monotonic", lambda: 1000.0)
    page = StatusPage(tmp_path / "status")
    pages: list[float] = []
    before = EngineProcess._before_launch

    def before_launch(p: EngineProcess, step: ScheduledStep) -> None:
        before(p, step)
        pages.append(page.read().stall_time)

    monkeypatch.setattr(EngineProcess, "_before_launch", before_launch)
    p = start(stall_timeout_s=90.0)
    assert page.read().stall_time == 1010.0
    p._apply(0, add_request([1, 2], 0))
    step(p)
    monkeypatch.setattr(p._engine.scheduler.cost, "predict", lambda load: 1.5)
    step(p)
    monkeypatch.setattr(p._engine.scheduler.cost, "predict", lambda load: 20.0)
    step(p)
    assert pages == [1090.0, 1015.0, 1090.0]


def test_a_picture_is_on_record_and_has_its_time_while_it_is_encoded(start: Start, tmp_path: pathlib.Path) -> None:
    """An encoder that crashed had no suspect, and one that took long counted as hanging."""
    p = start(stall_timeout_s=60.0)
    p._apply(0, add_request([1, 2], 0))
    p._apply(0, add_request([3], 1))
    other = p._engine.scheduler.waiting.first
    assert other is not None
    for predicted_s, allowed_s in ((0.0, 60.0), (0.5, 10.0), (4.0, 40.0), (50.0, 100.0)):
        p._engine.sight.before_encode(other, predicted_s)
        status = p._page.read()
        assert status.stall_time - status.progress_time == pytest.approx(allowed_s)
    assert suspects(tmp_path, [1, 2], [3]) == [True, False]
