"""The runner over a model that is a table: which results travel when, and what happens without memory."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch

from tests.engine.paged import paged_specs
from weft.engine import device as transfer
from weft.engine.batch import Batch, Placeholders, ScoreBatch
from weft.engine.device import Download
from weft.engine.kernels.torch.caches import Caches
from weft.engine.layers.block import AttentionStep
from weft.engine.runner import model_runner
from weft.engine.runner.dummy_batch import dummy_batch
from weft.engine.runner.model_runner import LaunchedStep, ModelRunner

VOCAB_SIZE = 40
CPU = torch.device("cpu")


class NextNumber:
    """The most probable id is the one behind the input id. Fails as often as it is told to."""

    num_failures = 0
    error: RuntimeError = torch.OutOfMemoryError("none left")
    fails_with_logits = False
    rows: torch.Tensor | None = None

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self.fails_with_logits:
            self._fail()
        self.rows = rows
        read = token_ids if rows is None else token_ids[rows]
        return torch.nn.functional.one_hot((read + 1) % VOCAB_SIZE, VOCAB_SIZE).float()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self._fail()
        return hidden_states.clone()

    def _fail(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise self.error


class NoAttention:
    name = "none"
    supports_graphs = False

    def begin(self, batch: Batch) -> None:
        """The model does not attend."""

    def __init__(self, num_slices: int = 0) -> None:
        self.num_slices = num_slices

    def prepare(self) -> bool:
        self.num_slices -= 1
        return self.num_slices >= 0


@pytest.fixture
def model() -> NextNumber:
    return NextNumber()


@pytest.fixture
def runner(model: NextNumber) -> ModelRunner:
    return ModelRunner(model, Caches(NoAttention()), CPU)  # type: ignore[arg-type]


def make_batch(token_ids: Sequence[int], sources: Sequence[int] = (), num_logprobs: int = -1) -> Batch:
    """Every token is sampled behind; the last ones come from rows of the previous step."""
    batch = dummy_batch(len(token_ids), paged_specs(None), 16, len(token_ids))
    targets = np.arange(len(token_ids) - len(sources), len(token_ids))
    return dataclasses.replace(
        batch,
        token_ids=np.array(token_ids),
        placeholders=Placeholders(targets, np.array(sources, np.int64)),
        sampling=dataclasses.replace(batch.sampling, num_logprobs=np.full(len(token_ids), num_logprobs)),
    )


def test_results_are_on_their_way_before_the_next_step_is_launched(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results were fetched when they were collected, behind the next step: the host waited for that one as well."""
    seen: list[str] = []

    class Recorded(Download):
        def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
            super().__init__(tensors, device)
            self.number = sum(entry.startswith("download") for entry in seen)
            seen.append(f"download {self.number}")

        def wait(self) -> list[torch.Tensor]:
            seen.append(f"wait {self.number}")
            return super().wait()

    monkeypatch.setattr(model_runner, "Download", Recorded)
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda *args: (seen.append("forward"), forward(*args))[1])
    launched: list[LaunchedStep] = [runner.launch(make_batch([7, 8]))]
    ids = []
    for _ in range(2):  # as the engine does with overlap
        launched.append(runner.launch(make_batch([0, 0], sources=[1, 0])))
        ids.append(runner.collect(launched.pop(0)).token_ids)
    ids.append(runner.collect(launched.pop()).token_ids)
    assert ids == [[8, 9], [10, 9], [10, 11]]
    assert seen == [
        *("forward", "download 0", "forward", "download 1", "wait 0"),
        *("forward", "download 2", "wait 1", "wait 2"),
    ]


class Mark:
    """A point in a device's queue, half a second behind the one before."""

    marks: ClassVar[list["Mark"]] = []

    def __init__(self) -> None:
        self.number = len(Mark.marks)
        self.is_awaited = False
        Mark.marks.append(self)

    def synchronize(self) -> None:
        self.is_awaited = True

    def elapsed_time(self, end: "Mark") -> float:
        return 500.0 * (end.number - self.number)


def test_every_step_is_awaited_and_timed_by_the_device(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that samples nothing had no end: a long prompt was queued whole, and timed by the host."""
    assert runner.collect(runner.launch(make_batch([7]))).device_s is None
    for module in (model_runner, transfer):
        monkeypatch.setattr(module, "mark", lambda device: Mark())
    chunk = dataclasses.replace(make_batch([7]), row_indices=np.zeros(0, np.int64))
    launched = [runner.launch(batch) for batch in (chunk, make_batch([7]))]
    for index, step in enumerate(launched):
        result = runner.collect(step)
        assert result.device_s == 0.5 and len(result.token_ids) == index
        assert [mark.is_awaited for mark in Mark.marks] == [i % 2 == 1 and i <= 2 * index + 1 for i in range(4)]


def test_everything_that_is_reported_travels_in_one_download(runner: ModelRunner) -> None:
    scores = ScoreBatch(np.array([0, 1]), np.array([6, 9]), np.array([0, 2]))
    batch = dataclasses.replace(make_batch([5, 8], num_logprobs=1), scores=scores)
    launched = runner.launch(batch)
    assert len(launched.download.wait()) == 1 + 4 + 4
    result = runner.collect(launched)
    certain = torch.log_softmax(torch.eye(VOCAB_SIZE)[0], 0)[0].item()
    assert result.token_ids == [6, 9]
    assert {row: entry.top_token_ids for row, entry in result.logprobs.items()} == {0: [6], 1: [9]}
    assert [entry.logprob for entry in result.scores] == pytest.approx([certain, certain])
    assert [len(entry.top_token_ids) for entry in result.scores] == [0, 2]


def test_the_model_is_told_which_tokens_are_read(model: NextNumber, runner: ModelRunner) -> None:
    batch = dummy_batch(8, paged_specs(None), 16, 2)
    assert runner.collect(runner.launch(batch)).token_ids == [1, 1]
    assert model.rows is not None and model.rows.tolist() == [6, 7]
    scored = dataclasses.replace(batch, scores=ScoreBatch(np.array([0, 3]), np.array([1, 1]), np.array([0, 0])))
    result = runner.collect(runner.launch(scored))
    assert model.rows is None and result.token_ids == [1, 1] and len(result.scores) == 2


@pytest.mark.parametrize("fails_with_logits", [False, True])
def test_a_step_that_ran_out_of_memory_is_launched_once_more(
    model: NextNumber, runner: ModelRunner, fails_with_logits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runner.launch(make_batch([3, 11]))
    model.num_failures, model.fails_with_logits = 1, fails_with_logits
    with caplog.at_level(logging.WARNING):
        launched = runner.launch(make_batch([20, 0, 0], sources=[1, 0]))
    assert runner.collect(launched).token_ids == [21, 13, 5]
    assert caplog.messages == ["a step of 3 tokens ran out of memory and is launched again"]


def test_a_step_that_runs_out_of_memory_twice_fails_and_the_next_one_does_not(
    model: NextNumber, runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    model.num_failures = 2
    with pytest.raises(torch.OutOfMemoryError):
        runner.launch(make_batch([1]))
    assert runner.collect(runner.launch(make_batch([1]))).token_ids == [2]


def test_only_what_memory_was_missing_for_is_launched_again(model: NextNumber, runner: ModelRunner) -> None:
    model.num_failures, model.error = 1, RuntimeError("CUDA error: out of memory")  # of the driver, not of torch
    assert runner.collect(runner.launch(make_batch([1]))).token_ids == [2]
    model.num_failures, model.error = 1, RuntimeError("wrong shape")
    with pytest.raises(RuntimeError, match="wrong shape"):
        runner.launch(make_batch([1]))


def test_idle_time_goes_to_the_cache_and_then_to_that_of_the_draft() -> None:
    own, drafts = NoAttention(2), NoAttention(3)

    class Following:
        prepare, reads_hidden, launches = drafts.prepare, False, False

        def follow(self, batch: Batch, computed: object, sampled_ids: torch.Tensor | None) -> None:
            """Nothing runs here."""

    runner = ModelRunner(NextNumber(), Caches(own), CPU, Following())  # type: ignore[arg-type]
    assert [runner.prepare() for _ in range(2)] == [True, True] and drafts.num_slices == 3
    assert [runner.prepare() for _ in range(4)] == [True, True, True, False]
