"""Candidates that are slow, wrong, broken or missing, on the CPU."""

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from weft.engine.tune import compare as settle
from weft.engine.tune.compare import Candidate, ChoiceFile, Component, Judge, Trial, Tuner, measure_on, relative_errors
from weft.engine.wire.errors import ModelError

INPUTS = torch.arange(12.0).view(3, 4)


def product() -> torch.Tensor:
    return INPUTS @ INPUTS.t()


def slow() -> torch.Tensor:
    time.sleep(0.02)
    return product()


def wrong_in_one_row() -> torch.Tensor:
    outputs = product()
    outputs[1] *= 1.2
    return outputs


def not_a_number() -> torch.Tensor:
    return product() * math.nan


def broken() -> torch.Tensor:
    raise RuntimeError("no kernel image\n for this device")


def missing() -> Trial:
    raise ModelError("not installed")


def candidate(run: Callable[[], torch.Tensor]) -> Candidate:
    return Candidate(run.__name__, lambda: Trial(lambda: [run()], run))


def component(*candidates: Candidate, shapes: str = "3 x 4") -> Component:
    return Component("few_row_products", shapes, candidates, "torch", lambda: relative_errors([product()]), 0.01)


@pytest.fixture
def file(tmp_path: Path) -> ChoiceFile:
    return ChoiceFile(tmp_path / "weft" / "settled.json", "this machine")


@pytest.fixture
def tuner(file: ChoiceFile) -> Tuner:
    return Tuner(file, measure_on(torch.device("cpu")))


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_fastest_right_candidate_is_taken(
    tuner: Tuner, file: ChoiceFile, is_reversed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    candidates = [candidate(run) for run in (slow, wrong_in_one_row, product)]
    with caplog.at_level("INFO", "weft.engine.tune.compare"):
        assert tuner.tune(component(*(reversed(candidates) if is_reversed else candidates))) == "product"
    (kept,) = file.of_this_machine()
    by_name = {verdict.candidate: verdict for verdict in kept.verdicts}
    assert by_name["wrong_in_one_row"].fault == "wrong: its error is 0.2, more than 0.01"
    assert by_name["wrong_in_one_row"].seconds is None  # it is not even timed
    assert by_name["slow"].seconds is not None and by_name["slow"].seconds > 0.02
    assert kept.summary().startswith("product 0.0")
    warning, line = (record.message for record in caplog.records)
    assert warning == "few_row_products: wrong_in_one_row is not used; wrong: its error is 0.2, more than 0.01"
    assert line == f"few_row_products: {kept.summary()}"


def test_what_cannot_be_used_is_listed_with_the_reason(tuner: Tuner, file: ChoiceFile) -> None:
    others = [candidate(not_a_number), candidate(broken), Candidate("missing", missing)]
    assert tuner.tune(component(*others, candidate(slow))) == "slow"
    assert file.of_this_machine()[0].summary() == (
        "slow; not_a_number: wrong: its error is nan, more than 0.01; "
        "broken: RuntimeError: no kernel image for this device; missing: not installed"
    )


def test_the_reference_is_taken_where_nothing_is_right(tuner: Tuner) -> None:
    assert tuner.tune(component(candidate(broken), candidate(not_a_number))) == "torch"
    assert tuner.tune(component()) == "torch"


def test_a_candidate_that_fails_while_it_is_timed_is_not_taken(tuner: Tuner) -> None:
    failing = Candidate("failing", lambda: Trial(lambda: [product()], broken))
    assert tuner.tune(component(failing, candidate(slow))) == "slow"


def test_right_candidates_that_cannot_be_timed_stay_right(tuner: Tuner, file: ChoiceFile) -> None:
    """Torch's reference was taken instead, for good, as where a recording failed for want of memory."""
    failing = [Candidate(name, lambda: Trial(lambda: [product()], broken)) for name in ("first", "second")]
    assert tuner.tune(component(*failing)) == "first"
    assert file.of_this_machine() == ()


def test_a_candidate_that_breaks_the_device_ends_the_start(file: ChoiceFile) -> None:
    """All that came after it failed as well, and torch's reference was kept for every component."""

    def check_device() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    fragile = Tuner(file, measure_on(torch.device("cpu")), check_device)
    assert fragile.tune(component(candidate(product))) == "product"
    with pytest.raises(
        ModelError, match=r"^few_row_products: broken broke the device \(RuntimeError: an illegal .*\);"
    ):
        fragile.tune(component(candidate(broken), candidate(slow), shapes="other"))
    assert [settled.shapes for settled in file.of_this_machine()] == ["3 x 4"]


def test_nothing_runs_for_what_is_kept(tuner: Tuner, file: ChoiceFile, caplog: pytest.LogCaptureFixture) -> None:
    assert tuner.tune(component(candidate(slow), candidate(product))) == "product"
    runs: list[str] = []

    def make(name: str) -> Trial:
        runs.append(name)
        return Trial(lambda: [product()], product)

    def reference() -> Judge:
        runs.append("reference")
        return relative_errors([product()])

    named = tuple(Candidate(name, partial(make, name)) for name in ("slow", "product"))
    later = Component("few_row_products", "3 x 4", named, "torch", reference, 0.01)
    again = Tuner(file, lambda run: pytest.fail("it was timed"))
    with caplog.at_level("INFO", "weft.engine.tune.compare"):
        assert again.tune(later) == "product"
    assert caplog.records[-1].message.startswith("few_row_products: product 0.0") and runs == []
    assert caplog.records[-1].message.endswith(" (kept)")
    # Another shape, another candidate or another machine is another matter.
    other = Component("few_row_products", "9 x 4", named, "torch", reference, 0.01)
    tuner.tune(other)
    assert runs == ["slow", "reference", "product"]
    tuner.tune(component(*named, candidate(broken)))
    assert len(runs) == 5


def test_a_setting_decides_without_a_run(tuner: Tuner, file: ChoiceFile) -> None:
    assert tuner.tune(component(candidate(broken)), "broken") == "broken"
    assert tuner.tune(component(candidate(broken)), "torch") == "torch"
    assert file.of_this_machine() == ()
    with pytest.raises(ModelError, match=r"^kernels: few_row_products cannot be fast here: there is broken, torch$"):
        tuner.tune(component(candidate(broken)), "fast")


def test_what_memory_was_missing_for_is_tried_again(tuner: Tuner, file: ChoiceFile) -> None:
    """Another program may have had the device's memory at that moment."""

    def crowded() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert tuner.tune(component(candidate(crowded), candidate(slow))) == "slow"
    assert file.of_this_machine() == ()


def test_candidates_of_equal_results_differ_in_speed_only(tuner: Tuner) -> None:
    def timed(seconds: float) -> Candidate:
        return Candidate(
            f"{seconds}", lambda: Trial(lambda: pytest.fail("it was compared"), partial(time.sleep, seconds))
        )

    assert tuner.tune(Component("threads", "", (timed(0.05), timed(0.001)), "0.05", None)) == "0.001"


def test_what_other_load_decided_once_does_not_hold_for_ever(
    file: ChoiceFile, caplog: pytest.LogCaptureFixture
) -> None:
    """A first start beside another program kept one thread for a machine on which two are faster."""
    times = {"1": [3.0, 3.0, 9.0], "2": [5.0, 2.0, 7.0]}
    names = iter([name for _ in range(3) for name in times])
    starts = {name: iter(each) for name, each in times.items()}
    threads = tuple(Candidate(name, lambda: Trial(lambda: (), lambda: None)) for name in times)
    component = Component("threads", "16 rows", threads, "2", None)

    def chosen(measure: Callable[[Callable[[], object]], float]) -> str:
        return Tuner(ChoiceFile(file._path, "this machine"), measure).tune(component)

    measure = lambda _: next(starts[next(names)])  # noqa: E731
    assert [chosen(measure) for _ in range(3)] == ["1", "2", "2"]
    (kept,) = file.of_this_machine()
    assert ([verdict.seconds for verdict in kept.verdicts], kept.num_starts) == ([3.0, 2.0], 3)
    assert chosen(lambda _: pytest.fail("it was timed")) == "2"
    other = ChoiceFile(file._path, "this machine, another build")
    assert Tuner(other, lambda run: 1.0).tune(component) == "1"  # as if nothing were kept
    assert [each.num_starts for each in other.of_this_machine()] == [1]


def test_a_start_that_cannot_time_keeps_what_earlier_ones_found(file: ChoiceFile) -> None:
    def named(run: Callable[[], object]) -> Component:
        candidates = tuple(Candidate(name, lambda: Trial(lambda: (), run)) for name in ("1", "2"))
        return Component("threads", "16 rows", candidates, "2", None)

    times = iter([2.0, 1.0])
    assert Tuner(file, lambda run: next(times)).tune(named(lambda: None)) == "2"
    before = file.of_this_machine()

    def fail(run: Callable[[], object]) -> float:
        raise RuntimeError("no clock")

    assert Tuner(file, fail).tune(named(lambda: None)) == "2"
    assert file.of_this_machine() == before


def test_on_cuda_several_runs_in_one_graph_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic alone, with a graph and a clock that stand in for CUDA's."""
    runs: list[str] = []
    clock_ms = 0.0

    class Recording:
        def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            return self.replay, work()

        def replay(self) -> None:
            nonlocal clock_ms
            clock_ms += next(times_ms)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = clock_ms

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return end.at_ms - self.at_ms

    times_ms = iter([90.0, 9.0, 8.0, 12.0, 8.5, 8.1])  # the first one is not timed
    monkeypatch.setattr(settle, "CudaCapture", Recording)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert measure_on(torch.device("cuda"))(lambda: runs.append("run")) == pytest.approx(0.002)
    assert len(runs) == 4


def test_a_fallback_that_is_wrong_itself_is_warned_of(tuner: Tuner, caplog: pytest.LogCaptureFixture) -> None:
    """Where torch was a candidate, too, and wrong, the line was one of many that tell of choices."""
    wrong = Candidate("torch", lambda: Trial(lambda: [not_a_number()], not_a_number))
    with caplog.at_level("INFO", "weft.engine.tune.compare"):
        assert tuner.tune(component(candidate(broken), wrong)) == "torch"
    assert (caplog.records[-1].levelname, caplog.records[-1].message.partition(";")[0]) == (
        "WARNING",
        "few_row_products: torch: wrong: its error is nan, more than 0.01",
    )
