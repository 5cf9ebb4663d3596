"""Requests that wait for their grammar: nobody else waits with them."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from tests.engine.fake_runner import make_engine
from tests.engine.guidance.demo import Answers, guided
from tests.engine.guidance.slow_compiler import SlowCompiler
from tests.engine.requests_for_tests import add_request
from tests.engine.schedule.test_admission import num_operations
from weft.engine.guidance.compiler import InvalidGrammarError
from weft.engine.guidance.matcher import GrammarMatcher
from weft.engine.loop import grammars as pending_module
from weft.engine.loop.engine import Engine
from weft.engine.loop.grammars import PendingGrammars
from weft.engine.loop.pending import RejectedError
from weft.engine.wire.messages import FinishReason, RejectReason


@pytest.fixture
def compiler() -> SlowCompiler:
    return SlowCompiler()


def engine_with(compiler: SlowCompiler, limit_s: float = 10.0, **options: int) -> Engine:
    engine = make_engine(**options).engine  # type: ignore[arg-type]
    engine.pending.grammars = PendingGrammars(compiler, limit_s)  # type: ignore[arg-type]
    return engine


def faults(engine: Engine) -> dict[int, str | None]:
    return {compiled.request.key.request_id: compiled.fault for compiled in engine.take_ready()}


def test_others_run_while_a_grammar_is_compiled(compiler: SlowCompiler) -> None:
    engine = engine_with(compiler)
    assert engine.add(0, guided(add_request([1], 0, max_tokens=2), "a")) is False
    assert engine.add(0, add_request([2], 1, max_tokens=2)) is True
    assert (engine.num_waiting, faults(engine)) == (2, {})
    assert [output.request_id for _, output in engine.step()] == [1]
    assert engine.step()[0][1].finish_reason is FinishReason.LENGTH
    assert engine.has_work
    assert (engine.step(), engine.scheduler.counters.num_steps) == ([], 2)
    compiler.finish("a")
    assert (faults(engine), engine.num_waiting) == ({0: None}, 1)
    assert [output.request_id for _, output in engine.step()] == [0]


def test_who_came_first_is_served_first_once_compiled(compiler: SlowCompiler) -> None:
    engine = engine_with(compiler, max_num_seqs=1)
    for request_id, grammar in enumerate(["slow", "fast", None]):
        engine.add(0, guided(add_request([1], request_id, max_tokens=1), grammar))
    compiler.finish("fast")
    assert faults(engine) == {1: None}
    assert [output.request_id for _, output in engine.step()] == [1]
    compiler.finish("slow")
    assert faults(engine) == {0: None}
    assert [[output.request_id for _, output in engine.step()] for _ in range(2)] == [[0], [2]]


def test_requests_of_one_text_wait_for_one_compilation(compiler: SlowCompiler) -> None:
    engine = engine_with(compiler)
    for request_id in range(3):
        engine.add(0, guided(add_request([1], request_id), "same"))
    compiler.finish("same")
    assert faults(engine) == {0: None, 1: None, 2: None}
    matchers = {id(request.grammar) for request in engine.scheduler.waiting}
    assert len(matchers) == 3


def test_faults_reject(compiler: SlowCompiler, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with(compiler)
    for request_id, error in enumerate([InvalidGrammarError("wrong at 3"), MemoryError()]):
        engine.add(0, guided(add_request([1], request_id), str(request_id)))
        compiler.futures[str(request_id)].set_exception(error)
    assert faults(engine) == {0: "wrong at 3", 1: "the grammar could not be compiled: MemoryError"}
    assert not engine.has_work


def test_who_waits_too_long_is_rejected(compiler: SlowCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(compiler, limit_s=0.02)
    now = 100.0
    monkeypatch.setattr(pending_module, "time", SimpleNamespace(monotonic=lambda: now))
    engine.add(0, guided(add_request([1]), "slow"))
    now += 0.03  # behind the grammars of others, which is nobody's fault
    compiler.futures["slow"].set_running_or_notify_cancel()
    assert faults(engine) == {}
    now += 0.03
    assert faults(engine) == {0: "the grammar could not be compiled within 0.02 s"}
    assert not engine.has_work


def test_a_deadline_that_passes_meanwhile_ends_the_request(compiler: SlowCompiler) -> None:
    engine = engine_with(compiler)
    engine.add(0, guided(add_request([1], deadline=time.monotonic() - 1), "slow"))
    compiler.finish("slow")
    assert faults(engine) == {0: None}
    assert [output.finish_reason for _, output in engine.step()] == [FinishReason.TIMEOUT]


def test_aborted_requests_are_forgotten(compiler: SlowCompiler) -> None:
    engine = engine_with(compiler)
    for connection, request_id in ((0, 0), (0, 1), (1, 0), (1, 1)):
        engine.add(connection, guided(add_request([1], request_id), "slow"))
    engine.abort(0, 1)
    engine.abort_connection(1)
    compiler.finish("slow")
    assert [compiled.request.key[:2] for compiled in engine.take_ready()] == [(0, 0)]


def test_a_choice_that_is_aborted_while_its_grammar_compiles_gives_nothing(compiler: SlowCompiler) -> None:
    engine = engine_with(compiler)
    engine.add(0, guided(add_request([1], num_choices=3, max_tokens=3), "slow"))
    engine.abort(0, 0, 0)
    engine.abort(0, 0, 2)
    compiler.finish("slow")
    assert faults(engine) == {0: None}
    answers = Answers()
    while engine.has_work:
        answers.take(engine.step())
    assert list(answers.ends) == [(0, 1)]


def test_those_who_wait_for_a_grammar_count_as_waiting(compiler: SlowCompiler) -> None:
    engine = engine_with(compiler, max_num_waiting=2)
    engine.add(0, guided(add_request([1], 0), "slow"))
    engine.add(0, add_request([1], 1))
    with pytest.raises(RejectedError, match="2 requests are waiting, at most 2 may"):
        engine.add(0, guided(add_request([1], 2), "slow"))


def test_an_engine_without_grammars_rejects_them() -> None:
    with pytest.raises(RejectedError, match="follows no grammars") as caught:
        make_engine().engine.add(0, guided(add_request([1]), "any"))
    assert caught.value.reason is RejectReason.GRAMMAR


def test_nobody_is_blamed_for_the_queue(compiler: SlowCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waited behind the grammars of others was told that its own could not be compiled, and not to try again."""
    engine = engine_with(compiler)
    engine.add(0, guided(add_request([1], request_id=0), "queued"))
    monkeypatch.setattr(pending_module, "QUEUE_LIMIT_S", -1.0)
    (compiled,) = engine.take_ready()
    assert compiled.reason is RejectReason.QUEUE_FULL
    assert compiled.fault is not None and "try again" in compiled.fault


def test_what_nobody_waits_for_is_not_compiled(compiler: SlowCompiler) -> None:
    engine = engine_with(compiler)
    for request_id in (0, 1):
        engine.add(0, guided(add_request([1], request_id=request_id), "shared"))
    engine.abort(0, 0)
    assert not compiler.futures["shared"].cancelled()
    engine.abort(0, 1)
    assert compiler.futures["shared"].cancelled()


class QueueCompiler(SlowCompiler):
    """Every text is another's; the first two are being compiled."""

    def compile(self, text: str) -> Future[GrammarMatcher]:
        future = super().compile(text)
        if len(self.futures) <= 2:
            future.set_running_or_notify_cancel()
        return future


def crowd(num_waiting: int) -> tuple[Engine, QueueCompiler]:
    compiler = QueueCompiler()
    engine = engine_with(compiler, max_num_waiting=10_000)
    for request_id in range(num_waiting):
        engine.add(0, guided(add_request([1], request_id), str(request_id)))
    assert faults(engine) == {}
    return engine, compiler


@pytest.mark.parametrize(
    "work",
    [
        lambda pending: pending.take_ready(),
        lambda pending: pending.requests,
        lambda pending: pending.has(0, 50),
        lambda pending: pending.abort(0, 50),
        lambda pending: pending.abort(0, 51, 0),
    ],
    ids=["take_ready", "requests", "has", "abort", "abort a choice"],
)
def test_a_long_queue_costs_the_step_loop_no_more(work: Callable[[PendingGrammars], object]) -> None:
    """Each step looked at all that wait, as did each abort: 1.8 ms a step when 1,000 did."""
    few, many = crowd(60)[0].pending.grammars, crowd(3000)[0].pending.grammars
    assert few is not None and many is not None
    assert num_operations(lambda: work(many)) <= 1.5 * num_operations(lambda: work(few)) + 50


def test_who_waits_behind_the_grammars_of_others_is_no_suspect() -> None:
    """A crash made all that waited suspects, which then ran alone, one after the other."""
    engine, compiler = crowd(1000)
    assert engine.pending.grammars is not None
    assert [request.key.request_id for request in engine.pending.grammars.requests] == [0, 1, 2, 3, 4, 5]
    compiler.finish("0")
    assert faults(engine) == {0: None}
    assert [request.key.request_id for request in engine.pending.grammars.requests] == [1, 2, 3, 4, 5, 6]


def test_a_queue_moves_on_from_those_that_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pending_module, "time", SimpleNamespace(monotonic=lambda: now))
    engine, compiler = crowd(5)
    now += 10.1
    assert faults(engine) == {i: "the grammar could not be compiled within 10 s" for i in range(2)}
    compiler.futures["2"].set_running_or_notify_cancel()
    assert faults(engine) == {}
    engine.add(0, guided(add_request([1], 9), "0"))  # still being compiled for those who left
    now += 10.1
    assert faults(engine) == {i: "the grammar could not be compiled within 10 s" for i in (2, 9)}
    now += 40
    assert faults(engine) == {i: "too many grammars wait to be compiled; try again" for i in (3, 4)}
    assert compiler.futures["4"].cancelled()
    assert not engine.has_work
