"""Decode graphs of a tiny model on the CPU, where recorded operations stand in for CUDA graphs."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import MAX_POSITION_EMBEDDINGS, VOCAB_SIZE
from tests.engine.paged import PagedRequests, paged_specs
from tests.engine.recording import RecordedCapture, StaticBackend
from tests.engine.requests_for_tests import add_request
from weft.engine.cache.manager import KVCacheManager
from weft.engine.cache.specs import group_layers, paged_groups
from weft.engine.core.engine import Engine
from weft.engine.core.scheduler import Scheduler
from weft.engine.core.step_cost import StepCostModel
from weft.engine.kernels.caches import Caches
from weft.engine.kernels.torch.sampling import draw
from weft.engine.kernels.torch.torch_kit import TorchKit
from weft.engine.models.config import load_model_config
from weft.engine.models.decoder import Decoder
from weft.engine.models.loading import load_weights
from weft.engine.run import cuda_graphs
from weft.engine.run.cuda_graphs import DecodeGraphs, GraphKey, graph_sizes, pad
from weft.engine.run.dummy_batch import dummy_batch
from weft.engine.run.model_runner import ModelRunner
from weft.engine.sampling.in_graph import GraphSampler
from weft.engine.shared.messages import RequestOutput, TokensOutput
from weft.engine.step.batch import Floats, SamplingBatch

NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_TOKENS = 40, 4, 6, 32
CPU = torch.device("cpu")


@pytest.fixture
def model(checkpoint_folder: Callable[[str], Path]) -> Decoder:
    folder = checkpoint_folder("qwen3")
    config = load_model_config(folder)
    return load_weights(
        folder, config, TorchKit(), device=CPU, dtype=torch.float32, max_model_len=MAX_POSITION_EMBEDDINGS
    )


class PlainSampler:
    """Greedy or drawn from the whole distribution: what can be told by two parameters."""

    def kind(self, batch: SamplingBatch) -> int | None:
        return None if (batch.top_ps < 1).any() else 3

    def parameters(self, batch: SamplingBatch, num_rows: int) -> Floats:
        parameters = np.stack((batch.temperatures, batch.uniforms))
        return np.pad(parameters, ((0, 0), (0, num_rows - parameters.shape[1])), "edge")

    def sample(self, logits: torch.Tensor, parameters: torch.Tensor, kind: int) -> torch.Tensor:
        assert kind == 3
        temperatures, uniforms = parameters.unbind(0)
        best = logits.argmax(-1)
        weights = (logits - logits.gather(1, best[:, None])).div_(temperatures[:, None]).exp_()
        return torch.where(temperatures > 0, draw(weights, uniforms[:, None]), best)


def make_runner(
    model: Decoder, make_capture: Callable[[], RecordedCapture] | None, sampler: GraphSampler | None = None
) -> tuple[ModelRunner, DecodeGraphs | None]:
    groups = paged_groups(group_layers(model.cache_specs))
    caches = Caches(StaticBackend(groups, NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_TOKENS))
    graphs = None
    if make_capture is not None:
        graphs = DecodeGraphs(
            model,
            caches,
            CPU,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_rows=MAX_NUM_TOKENS,
            sampler=sampler,
            make_capture=make_capture,
        )
    return ModelRunner(model, caches, CPU, graphs=graphs), graphs


def serve(runner: ModelRunner, overlap: bool) -> dict[int, RequestOutput]:
    """Answer requests of every kind that come and go in the middle of others; what each request gained in all."""
    kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, paged_specs(None))
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_TOKENS}
    scheduler = Scheduler(kv, StepCostModel(), **limits, itl_target_s=10.0)
    vocabulary = {"vocab_size": VOCAB_SIZE, "max_model_len": MAX_POSITION_EMBEDDINGS}
    engine = Engine(scheduler, runner, **vocabulary, max_num_waiting=100, overlap=overlap)
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
    return gained


@pytest.mark.parametrize(("overlap", "sampler", "kinds"), [(False, None, {0}), (True, PlainSampler(), {3})])
def test_graphs_give_what_eager_steps_give(
    model: Decoder, overlap: bool, sampler: GraphSampler | None, kinds: set[int]
) -> None:
    plain = serve(make_runner(model, None)[0], overlap=False)
    runner, graphs = make_runner(model, RecordedCapture, sampler)
    replayed = serve(runner, overlap)
    assert graphs is not None
    assert {key.sampling for key in graphs._graphs} == {None, *kinds}
    assert len(graphs._graphs) >= 4
    assert [len(output.token_ids) for _, output in sorted(plain.items())] == list(range(12, 5, -1))
    for request_id, output in plain.items():
        assert replayed[request_id].token_ids == output.token_ids
        assert [entry.logprob for entry in replayed[request_id].logprobs or []] == pytest.approx(
            [entry.logprob for entry in output.logprobs or []], abs=1e-5
        )


def test_a_size_is_recorded_when_it_has_occurred_before_and_when_nobody_waits(model: Decoder) -> None:
    captures: list[RecordedCapture] = []

    def make_capture() -> RecordedCapture:
        captures.append(RecordedCapture())
        return captures[-1]

    runner, graphs = make_runner(model, make_capture)
    assert graphs is not None and not runner.prepare()
    paged = PagedRequests(NUM_BLOCKS, BLOCK_SIZE, (None,))
    requests = [paged.add(np.arange(20)) for _ in range(3)]

    def launch(*counts: int) -> None:
        batch = paged.make_batch(list(zip(requests, counts, strict=False)))
        rows = dummy_batch(len(counts), paged_specs(None), BLOCK_SIZE, len(counts)).sampling
        runner.collect(runner.launch(dataclasses.replace(batch, sampling=rows)))

    launch(4, 1, 1)  # a mixed step
    assert not captures
    for expected in ([], [], [GraphKey(4, 0)], [GraphKey(4, 0)]):
        launch(1, 1, 1)
        assert list(graphs._graphs) == expected
    launch(1)
    launch(1, 1)
    assert len(graphs._graphs) == 1
    assert runner.prepare()
    assert not runner.prepare()
    assert list(graphs._graphs) == [GraphKey(4, 0), GraphKey(1, 0), GraphKey(2, 0)]
    assert [capture.num_recorded for capture in captures] == [3]
    graphs.release()
    assert not graphs._graphs and not runner.prepare()
    for _ in range(3):
        launch(1)
    assert [capture.num_recorded for capture in captures] == [3, 1]


def test_a_step_with_adapters_runs_eagerly(model: Decoder) -> None:
    _, graphs = make_runner(model, RecordedCapture)
    assert graphs is not None
    paged = PagedRequests(NUM_BLOCKS, BLOCK_SIZE, (None,))
    request = paged.add(np.arange(20))
    rows = dummy_batch(1, paged_specs(None), BLOCK_SIZE, 1).sampling
    for adapters, may_replay in ((np.array([1]), False), (None, True)):
        for _ in range(3):
            batch = dataclasses.replace(paged.make_batch([(request, 1)]), sampling=rows, adapters=adapters)
            computed = graphs.run(batch, may_sample=True)
        assert (computed is not None) == may_replay


def test_an_engine_whose_steps_cannot_be_recorded_goes_on_without(
    model: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(RecordedCapture):
        def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            if self.num_recorded == 1:
                work()
                raise RuntimeError("operation not permitted")
            return super().record(work)

    plain = serve(make_runner(model, None)[0], overlap=True)
    runner, graphs = make_runner(model, Broken)
    with caplog.at_level(logging.ERROR):
        replayed = serve(runner, overlap=True)
    assert graphs is not None and len(graphs._graphs) == 1
    assert len(caplog.messages) == 1 and "no more CUDA graphs" in caplog.messages[0]
    assert {i: o.token_ids for i, o in replayed.items()} == {i: o.token_ids for i, o in plain.items()}
    assert not runner.prepare()


def test_a_size_that_there_was_no_memory_for_is_recorded_much_later(
    model: Decoder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_NUM_STEPS_WITHOUT_MEMORY", 4)
    attempts: list[int] = []

    class Full(RecordedCapture):
        is_open = False

        def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            assert not self.is_open, "torch takes nothing more into a pool in which a recording did not end"
            attempts.append(1)
            self.is_open = len(attempts) == 1
            if len(attempts) == 1:
                try:
                    raise torch.OutOfMemoryError("no memory for the graph")
                finally:  # as a recording ends that was broken off
                    raise RuntimeError("the capture was invalidated")
            return super().record(work)

    runner, graphs = make_runner(model, Full)
    assert graphs is not None
    paged = PagedRequests(NUM_BLOCKS, BLOCK_SIZE, (None,))
    request = paged.add(np.zeros(20, np.int64))
    recorded = []
    with caplog.at_level(logging.WARNING):
        for _ in range(11):
            batch = paged.make_batch([(request, 1)])
            rows = dummy_batch(1, paged_specs(None), BLOCK_SIZE, 1).sampling
            runner.collect(runner.launch(dataclasses.replace(batch, sampling=rows)))
            recorded.append(len(graphs._graphs))
            if len(recorded) == 5:
                assert not runner.prepare(), "not while memory is short"
    assert [("no memory to record" in message) for message in caplog.messages] == [True]
    assert recorded == [0] * 9 + [1] * 2
    assert len(attempts) == 2


def test_sizes_grow_in_steps_of_16_up_to_the_largest_batch() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(4) == [1, 2, 4]
    assert graph_sizes(30) == [1, 2, 4, 8, 16, 24, 30]
    assert graph_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert graph_sizes(256)[-3:] == [224, 240, 256]


def test_padding_has_no_slot_and_no_context() -> None:
    paged = PagedRequests(NUM_BLOCKS, BLOCK_SIZE, (None, 4))
    requests = [paged.add(np.arange(9)) for _ in range(2)]
    paged.make_batch([(requests[0], 6), (requests[1], 3)])
    batch = paged.make_batch([(request, 1) for request in requests])
    padded = pad(batch, 4)
    assert padded.num_tokens == padded.num_requests == 4
    assert padded.seq_lens.tolist() == [7, 4, 0, 0]
    assert padded.positions.tolist() == [6, 3, 0, 0]
    assert padded.query_start_locs.tolist() == [0, 1, 2, 3, 4]
    assert len(padded.row_indices) == 2
    for group, whole in zip(batch.groups, padded.groups, strict=True):
        assert whole.slot_mapping.tolist() == [*group.slot_mapping.tolist(), -1, -1]
        assert whole.block_tables[:2].tolist() == group.block_tables.tolist()
        assert not whole.block_tables[2:].any()
