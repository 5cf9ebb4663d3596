"""Graphs of a tiny model on the CPU, where recorded operations stand in for CUDA graphs."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import MAX_POSITION_EMBEDDINGS, VOCAB_SIZE
from tests.engine.paged import PagedRequest, PagedRequests, paged_specs
from tests.engine.recording import RecordedCapture, StaticBackend
from tests.engine.requests_for_tests import add_request
from weft.engine.batch import Batch, Floats, GraphKey, SamplingBatch, ScoreBatch
from weft.engine.cache.manager import KVCacheManager
from weft.engine.cache.specs import group_layers, paged_groups
from weft.engine.describe.config import load_model_config
from weft.engine.drafts import NgramDrafter
from weft.engine.kernels.torch.caches import Caches
from weft.engine.kernels.torch.layer_kernels import TorchKernels, draw
from weft.engine.layers.block import Decoder
from weft.engine.loop.engine import Engine
from weft.engine.models.loading import load_weights
from weft.engine.runner import cuda_graphs
from weft.engine.runner.cuda_graphs import StepGraphs, graph_keys, graph_sizes
from weft.engine.runner.dummy_batch import dummy_batch
from weft.engine.runner.model_runner import ModelRunner
from weft.engine.sampling.sampler import GraphSampler
from weft.engine.schedule.scheduler import Scheduler
from weft.engine.schedule.speculator import Drafter
from weft.engine.schedule.step_cost import StepCostModel
from weft.engine.wire.messages import RequestOutput, TokensOutput

NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_TOKENS = 40, 4, 6, 32
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operations as small as this model's are done before another thread has heard of them."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def model(checkpoint_folder: Callable[[str], Path]) -> Decoder:
    folder = checkpoint_folder("qwen3")
    config = load_model_config(folder)
    return load_weights(
        folder, config, TorchKernels(), device=CPU, dtype=torch.float32, max_model_len=MAX_POSITION_EMBEDDINGS
    )


class PlainSampler:
    """Greedy or drawn from the whole distribution: what can be told by two parameters."""

    def can_sample(self, batch: SamplingBatch) -> bool:
        return not (batch.top_ps < 1).any()

    def parameters(self, batch: SamplingBatch, num_rows: int) -> Floats:
        parameters = np.stack((batch.temperatures, batch.uniforms))
        return np.pad(parameters, ((0, 0), (0, num_rows - parameters.shape[1])), "edge")

    def sample(self, logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
        temperatures, uniforms = parameters.unbind(0)
        best = logits.argmax(-1)
        weights = (logits - logits.gather(1, best[:, None])).div_(temperatures[:, None]).exp_()
        return torch.where(temperatures > 0, draw(weights, uniforms[:, None]), best)


def make_runner(
    model: Decoder, make_capture: Callable[[], RecordedCapture] | None, sampler: GraphSampler | None = None
) -> tuple[ModelRunner, StepGraphs | None]:
    groups = paged_groups(group_layers(model.cache_specs))
    caches = Caches(StaticBackend(groups, NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_TOKENS))
    graphs = None
    if make_capture is not None:
        graphs = StepGraphs(
            model,
            caches,
            CPU,
            [group.spec for group in groups],
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_TOKENS,
            sampler=sampler,
            make_capture=make_capture,
        )
    return ModelRunner(model, caches, CPU, graphs=graphs), graphs


def recorded_runner(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, sampler: GraphSampler | None = None
) -> tuple[ModelRunner, StepGraphs, list[Batch], list[GraphKey]]:
    """A runner with all graphs, the batches that it computes eagerly from now on, and the graphs that it uses."""
    runner, graphs = make_runner(model, RecordedCapture, sampler)
    assert graphs is not None
    while runner.prepare():
        pass
    eager: list[Batch] = []
    used: list[GraphKey] = []
    forward, find = runner.forward, graphs._find

    def watched_find(batch: Batch, may_sample: bool) -> GraphKey | None:
        key = find(batch, may_sample)
        used.extend([key] if key else [])
        return key

    monkeypatch.setattr(runner, "forward", lambda ids, batch: (eager.append(batch), forward(ids, batch))[1])
    monkeypatch.setattr(graphs, "_find", watched_find)
    return runner, graphs, eager, used


def serve(runner: ModelRunner, overlap: bool, drafters: Sequence[Drafter] = ()) -> dict[int, RequestOutput]:
    """Answer requests of every kind that come and go in the middle of others; what each request gained in all."""
    kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, paged_specs(None))
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_TOKENS}
    scheduler = Scheduler(kv, StepCostModel(), **limits, itl_target_s=10.0)
    vocabulary = {"vocab_size": VOCAB_SIZE, "max_model_len": MAX_POSITION_EMBEDDINGS}
    engine = Engine(scheduler, runner, **vocabulary, max_num_waiting=100, overlap=overlap, drafters=drafters)
    generator = np.random.default_rng(3)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.5, "seed": 8},
        {"temperature": 1.0, "top_p": 0.9, "seed": 4},
        {"temperature": 0.0, "frequency_penalty": 1.5},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "logit_bias": {5: 30.0}},
        {"temperature": 0.0},
    ]
    gained: dict[int, RequestOutput] = {}

    def step() -> None:
        for _, output in engine.step():
            whole = gained.setdefault(output.request_id, TokensOutput(output.request_id, 0, [], logprobs=[]))
            whole.token_ids += output.token_ids
            whole.logprobs += output.logprobs or []  # type: ignore[operator]
            assert output.message is None

    for request_id, kind in enumerate(kinds):
        prompt = generator.integers(0, VOCAB_SIZE, 3 + 4 * request_id).tolist()
        engine.add(0, add_request(prompt, request_id, max_tokens=12 - request_id, **kind))
        for _ in range(request_id):
            step()
    while engine.has_work:
        step()
    assert (scheduler.counters.num_draft_tokens > 0) == bool(drafters)
    return gained


def check_equal(outputs: dict[int, RequestOutput], plain: dict[int, RequestOutput]) -> None:
    assert [len(output.token_ids) for _, output in sorted(plain.items())] == list(range(12, 5, -1))
    for request_id, output in plain.items():
        assert outputs[request_id].token_ids == output.token_ids
        assert [entry.logprob for entry in outputs[request_id].logprobs or []] == pytest.approx(
            [entry.logprob for entry in output.logprobs or []], abs=1e-5
        )


@pytest.mark.parametrize(("overlap", "sampler"), [(False, None), (True, PlainSampler())])
def test_graphs_give_what_eager_steps_give(
    model: Decoder, overlap: bool, sampler: GraphSampler | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = serve(make_runner(model, None)[0], overlap=False)
    runner, _, eager, used = recorded_runner(model, monkeypatch, sampler)
    check_equal(serve(runner, overlap), plain)
    assert not eager, "prompts, mixed steps and decodes with logprobs are graphs, too"
    assert {key.samples for key in used} == {True, False}
    assert len(set(used)) >= 6


@pytest.mark.usefixtures("cheap_drafts")
def test_drafts_are_verified_in_graphs(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = serve(make_runner(model, None)[0], overlap=False)
    runner, _, eager, _ = recorded_runner(model, monkeypatch, PlainSampler())
    check_equal(serve(runner, False, [NgramDrafter()]), plain)
    assert not eager


def launch(runner: ModelRunner, paged: PagedRequests, *scheduled: tuple[PagedRequest, int], **more: object) -> None:
    """A step whose requests sample their last token greedily."""
    rows = dummy_batch(len(scheduled), paged_specs(None), BLOCK_SIZE, len(scheduled)).sampling
    batch = dataclasses.replace(paged.make_batch(list(scheduled)), sampling=rows, **more)  # type: ignore[arg-type]
    runner.collect(runner.launch(batch))


def test_nothing_is_recorded_while_requests_run_and_a_step_takes_the_smallest_graph_that_holds_it(
    model: Decoder,
) -> None:
    """Recordings once took place between the steps of requests, which waited for each."""
    captures: list[RecordedCapture] = []

    def make_capture() -> RecordedCapture:
        captures.append(RecordedCapture())
        return captures[-1]

    runner, graphs = make_runner(model, make_capture)
    assert graphs is not None
    used: list[int] = []
    begin = graphs._caches.attention.begin
    graphs._caches.attention.begin = lambda batch: (used.append(batch.graph), begin(batch))[1]  # type: ignore
    paged = PagedRequests(NUM_BLOCKS, BLOCK_SIZE, (None,))
    first, second = [paged.add(np.zeros(60, np.int64)) for _ in range(2)]
    for _ in range(5):
        launch(runner, paged, (first, 1))
    assert used == [None] * 5 and not captures
    for expected in (GraphKey(6, True), GraphKey(4, True)):
        assert runner.prepare()
        launch(runner, paged, (first, 1))
        assert used[-2:] == [expected] * 2, "the recording and the step"
    launch(runner, paged, (first, 1), (second, 2))
    assert used[-1] is None, "no graph holds it yet"
    while runner.prepare():
        pass
    assert graphs.progress == (11, 11) and captures[0].num_recorded == 11
    launch(runner, paged, (first, 1))
    launch(runner, paged, (first, 1), (second, 2))
    launch(runner, paged, (first, 17), (second, 5))
    assert used[-3:] == [GraphKey(1, True), GraphKey(4, False), GraphKey(24, False)]
    graphs.release()
    launch(runner, paged, (first, 1))
    assert used[-1] is None and runner.prepare()
    assert [capture.num_recorded for capture in captures] == [11, 1]


@pytest.mark.parametrize(
    "more",
    [{"adapters": np.array([1])}, {"scores": ScoreBatch(*(np.zeros(1, np.int64) for _ in range(3)))}],
    ids=lambda more: next(iter(more)),
)
def test_steps_with_adapters_or_scores_run_eagerly(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, more: dict[str, object]
) -> None:
    runner, _, eager, _ = recorded_runner(model, monkeypatch)
    paged = PagedRequests(NUM_BLOCKS, BLOCK_SIZE, (None,))
    request = paged.add(np.arange(20))
    launch(runner, paged, (request, 3))
    assert not eager
    launch(runner, paged, (request, 3), **more)
    assert len(eager) == 1


def test_an_engine_whose_steps_cannot_be_recorded_goes_on_without(
    model: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    """The graphs recorded before stayed, on a stream whose workspace torch may clear after a failed recording."""

    class Broken(RecordedCapture):
        def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            if self.num_recorded == 1:
                work()
                raise RuntimeError("operation not permitted")
            return super().record(work)

    plain = serve(make_runner(model, None)[0], overlap=True)
    runner, graphs = make_runner(model, Broken)
    assert graphs is not None and runner.prepare() and graphs.progress[0] == 1
    with caplog.at_level(logging.ERROR):
        assert not runner.prepare()
        replayed = serve(runner, overlap=True)
    assert graphs.progress[0] == 0 and graphs._capture is None
    assert len(caplog.messages) == 1 and "no CUDA graphs are used" in caplog.messages[0]
    assert {i: o.token_ids for i, o in replayed.items()} == {i: o.token_ids for i, o in plain.items()}
    assert not runner.prepare()


@pytest.mark.parametrize(("num_fitting", "expected"), [(0, 10), (3, 3)])
def test_sizes_that_there_was_no_memory_for_are_recorded_much_later(
    model: Decoder,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    num_fitting: int,
    expected: int,
) -> None:
    """The others are recorded again: all of them if the first graph was too large, else those that fitted."""
    monkeypatch.setattr(cuda_graphs, "_NUM_STEPS_WITHOUT_MEMORY", 4)
    has_failed = False

    class Full(RecordedCapture):
        is_broken = False

        def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            nonlocal has_failed
            assert not self.is_broken, "torch takes nothing more into a pool in which a recording did not end"
            if self.num_recorded == num_fitting and not has_failed:
                has_failed = self.is_broken = True
                try:
                    raise torch.OutOfMemoryError("no memory for the graph")
                finally:  # as a recording ends that was broken off
                    raise RuntimeError("the capture was invalidated")
            return super().record(work)

    runner, graphs = make_runner(model, Full)
    assert graphs is not None
    with caplog.at_level(logging.WARNING):
        for _ in range(num_fitting):
            assert runner.prepare()
        assert runner.prepare() and graphs.progress[0] == 0, "they are released and may be recorded again"
        while runner.prepare():
            pass
    assert [("no memory to record" in message) for message in caplog.messages] == [True]
    paged = PagedRequests(NUM_BLOCKS, BLOCK_SIZE, (None,))
    request = paged.add(np.zeros(20, np.int64))
    for _ in range(4):
        assert graphs.progress == (expected, 11) and not runner.prepare(), "not while memory is short"
        launch(runner, paged, (request, 1))
    while runner.prepare():
        pass
    assert graphs.progress == (11, 11)


def test_sizes_grow_in_steps_up_to_the_limit() -> None:
    assert graph_sizes(0) == []
    assert graph_sizes(1) == [1]
    assert graph_sizes(4) == [1, 2, 4]
    assert graph_sizes(30) == [1, 2, 4, 8, 16, 24, 30]
    assert graph_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert graph_sizes(256)[-3:] == [224, 240, 256]
    assert graph_sizes(512)[-10:] == [240, 256, 288, 320, 352, 384, 416, 448, 480, 512]


@pytest.mark.parametrize(("max_num_seqs", "max_num_tokens"), [(256, 8192), (300, 2048), (7, 50), (1, 17), (0, 2)])
def test_the_first_graphs_hold_any_step_and_at_most_double_it(max_num_seqs: int, max_num_tokens: int) -> None:
    keys = graph_keys(max_num_seqs, max_num_tokens)
    assert len(set(keys)) == len(keys)
    limits = {True: max_num_seqs, False: min(max_num_tokens, 512)}
    num_first = sum(int(limit).bit_length() for limit in limits.values()) + 2
    for samples, limit in limits.items():
        sizes = sorted(size for size, graph_samples in keys[:num_first] if graph_samples == samples)
        for num_tokens in range(1, limit + 1):
            assert min(size for size in sizes if size >= num_tokens) <= 2 * num_tokens
        assert sorted(size for size, graph_samples in keys if graph_samples == samples) == graph_sizes(limit)
