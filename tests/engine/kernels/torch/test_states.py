"""The seam of the caches holds: layers that keep a state for each request stand beside attention, or alone.

The toy layer decays its state and adds a projection of each token. Its greedy ids are those of plain torch code that
computes each prompt alone and from the start for every token, however requests are cut, batched, preempted or forked.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.checkpoints import VOCAB_SIZE, load_reference
from tests.engine.plain_beam_search import plain_beam_search
from tests.engine.recording import RecordedCapture, StaticBackend
from tests.engine.test_golden import PreemptingScheduler, greedy, run
from weft.engine.batch import Batch
from weft.engine.cache.specs import CacheGroup, CacheSpec, StateSpec, paged_groups
from weft.engine.describe.config import ModelConfig
from weft.engine.describe.specs import BlockSpec, DecoderSpec, NormSpec
from weft.engine.kernels.choice import make_caches
from weft.engine.kernels.torch.caches import Caches, StateCache
from weft.engine.layers.block import Block, BlockStep, Layer, Linear
from weft.engine.layers.kernels import LayerKernels
from weft.engine.loop.engine import Engine
from weft.engine.models import loading
from weft.engine.parts.decoder import decoder_spec
from weft.engine.runner.cuda_graphs import StepGraphs
from weft.engine.runner.dummy_batch import dummy_batch
from weft.engine.runner.model_runner import ModelRunner
from weft.engine.schedule.scheduler import Scheduler
from weft.engine.start import model_choice, startup, warm_up
from weft.engine.start.startup import start
from weft.engine.weights.reader import TensorRef, WeightReader, WeightRef
from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, BeamOptions, EngineOptions, FinishReason, Guidance, TokenLogprobs
from weft.engine.wire.params import SamplingParams

CPU = torch.device("cpu")
DECAY = 0.8
NUM_OUTPUT_TOKENS = 10
MIN_GAP = 2e-3
PLACES = ("first", "last", "alone")
"""Of the recurrent layer: before or behind the one with attention, or two of them and none."""


@dataclass(frozen=True)
class RecurrentSpec(BlockSpec):
    norm: NormSpec
    matrix: WeightRef
    state: StateSpec

    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Block:
        return Recurrent(self.norm.build(kernels, reader), kernels.linear(self.matrix, reader), first_cache)


@dataclass(frozen=True)
class Recurrent:
    norm: Layer
    linear: Linear
    cache: int

    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        assert step.caches.states is not None
        inputs, outputs = self.linear(self.norm(hidden)), torch.empty_like(hidden)
        states = step.caches.states.read(self.cache)
        for row, (first, last) in enumerate(itertools.pairwise(step.caches.states.query_start_locs.tolist())):
            for token in range(first, last):
                states[row] = DECAY * states[row] + inputs[token]
                outputs[token] = states[row].tanh()
        step.caches.states.write(self.cache, states)
        hidden = hidden + outputs
        return hidden if step.rows is None else hidden[step.rows]


def recurrent(config: ModelConfig, layer: int) -> RecurrentSpec:
    size, prefix = config.hidden_size, f"model.layers.{layer}"
    matrix = WeightRef((f"{prefix}.self_attn.o_proj",), (size,), size)
    norm = NormSpec(TensorRef(f"{prefix}.input_layernorm.weight", (size,)), config.rms_norm_eps)
    return RecurrentSpec(norm, matrix, StateSpec((size,), torch.float32))


def layers_at(config: ModelConfig, attention: BlockSpec, place: str) -> tuple[BlockSpec, ...]:
    first, second = recurrent(config, 1), recurrent(config, 2)
    return {"first": (first, attention), "last": (attention, first), "alone": (first, second)}[place]


class PlainRecurrent(torch.nn.Module):
    """The layer over whole prompts, with the weights of one of transformers."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.norm, self.matrix = layer.input_layernorm, layer.self_attn.o_proj

    def forward(self, hidden: torch.Tensor, **unused: object) -> torch.Tensor:
        inputs, state, outputs = self.matrix(self.norm(hidden[0])), torch.zeros(hidden.shape[-1]), []
        for token in inputs:
            state = DECAY * state + token
            outputs.append(state.tanh())
        return hidden + torch.stack(outputs)


def plain_model(folder: Path, place: str) -> Callable[[list[int]], torch.Tensor]:
    """Logits (num_tokens, vocab_size) of a prompt."""
    model = load_reference(folder)
    attention, first, second = model.model.layers  # type: ignore[union-attr, misc]
    mixed = {"first": (PlainRecurrent(first), attention), "last": (attention, PlainRecurrent(first))}
    layers = mixed.get(place, (PlainRecurrent(first), PlainRecurrent(second)))
    model.model.layers = torch.nn.ModuleList(layers)  # type: ignore[union-attr, arg-type]
    model.config.num_hidden_layers = 2  # type: ignore[union-attr]
    return lambda ids: model(torch.tensor([ids]), use_cache=False).logits[0]


@dataclass(frozen=True)
class Golden:
    """Prompts, of which odd ones begin alike, and what plain torch code answers."""

    prompts: list[list[int]]
    outputs: list[list[int]]


def answers(compute: Callable[[list[int]], torch.Tensor]) -> Golden:
    generator = random.Random(3)
    prefix = [generator.randrange(4, VOCAB_SIZE) for _ in range(40)]
    golden = Golden([[7]], [])
    while len(golden.outputs) < 8:
        prompt = golden.prompts[-1]
        ids, gap = list(prompt), float("inf")
        for _ in range(NUM_OUTPUT_TOKENS):
            best = compute(ids)[-1].topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
        if gap > MIN_GAP and not {2, 3} & set(ids[len(prompt) :]):
            golden.outputs.append(ids[len(prompt) :])
        else:
            golden.prompts.pop()
        tail = [generator.randrange(4, VOCAB_SIZE) for _ in range(generator.randrange(1, 30))]
        golden.prompts.append(prefix * (len(golden.prompts) % 2) + tail)
    return golden


@pytest.fixture(autouse=True)
def restored_torch() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(checkpoint_folder: Callable[[str], Path], place: str) -> Callable[[list[int]], torch.Tensor]:
    return torch.inference_mode()(plain_model(checkpoint_folder("llama2"), place))


@pytest.fixture(scope="module")
def golden(plain: Callable[[list[int]], torch.Tensor]) -> Golden:
    return answers(plain)


@pytest.fixture
def make_engine(
    checkpoint_folder: Callable[[str], Path], place: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Engine]:
    """Starts the whole engine, memory plan and warm-up included, on a model whose layers are those of `place`."""

    def spec_of(config: ModelConfig) -> DecoderSpec:
        spec = decoder_spec(config)
        return replace(spec, blocks=layers_at(config, spec.blocks[0], place))

    class Unchecked(loading.CheckpointSource):
        def close(self) -> None:
            """Tensors that these layers do not read are no fault."""

    def make(*, overlap: bool = False, preempts: bool = False, least_stop: int = 8, **options: object) -> Engine:
        monkeypatch.setattr(model_choice, "decoder_spec", spec_of)
        monkeypatch.setattr(loading, "decoder_spec", spec_of)
        monkeypatch.setattr(loading, "CheckpointSource", Unchecked)
        monkeypatch.setattr(startup, "Scheduler", PreemptingScheduler if preempts else Scheduler)
        defaults: dict[str, object] = {"max_model_len": 128, "block_size": 8, "max_num_seqs": 24, "itl_target_ms": 1e6}
        folder = str(checkpoint_folder("llama2"))
        engine = start(EngineOptions(model=folder, device="cpu", dtype="float32", **(defaults | options)), "").engine  # type: ignore
        engine._overlap = overlap
        engine.scheduler.kv._least_stop = least_stop
        return engine

    return make


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize(("chunk", "num_choices"), [(32, 1), (33, 3), (512, 3)])
def test_greedy_ids_are_those_of_plain_torch(
    make_engine: Callable[..., Engine], golden: Golden, overlap: bool, preempts: bool, chunk: int, num_choices: int
) -> None:
    engine = make_engine(overlap=overlap, preempts=preempts, max_num_batched_tokens=chunk)
    adds = [greedy(number, prompt, num_choices) for number, prompt in enumerate(golden.prompts[:8])]
    results = run(engine, adds)
    for number, expected in enumerate(golden.outputs):
        for index in range(num_choices):
            assert results[number, index].token_ids == expected, (number, index)
    counters = engine.scheduler.counters
    assert counters.prefix_cache_hits > 0
    assert (counters.num_preemptions > 0) is preempts
    assert all(pool.num_used == 0 for pool in engine.scheduler.kv.pools)


def launched_batches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    batches: list[Batch] = []
    launch = engine._executor.launch

    def recorded(batch: Batch, masks: object) -> object:
        batches.append(batch)
        return launch(batch, masks)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._executor, "launch", recorded)
    return batches


@pytest.mark.parametrize("overlap", [False, True])
def test_choices_go_on_from_a_copy_of_the_state(
    make_engine: Callable[..., Engine], golden: Golden, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is computed once; each other choice computes its last token alone."""
    number = max(range(8), key=lambda n: len(golden.prompts[n]))
    engine = make_engine(overlap=overlap, least_stop=1000)
    batches = launched_batches(engine, monkeypatch)
    results = run(engine, [greedy(0, golden.prompts[number], 4)])
    assert [results[0, index].token_ids for index in range(4)] == [golden.outputs[number]] * 4
    num_prompt, num_decodes = len(golden.prompts[number]), 4 * (NUM_OUTPUT_TOKENS - 1)
    assert sum(batch.num_tokens for batch in batches) == num_prompt + 3 + num_decodes
    index = next(i for i, spec in enumerate(engine.scheduler.kv.specs) if isinstance(spec, StateSpec))
    copies = [len(batch.groups[index].block_copies) for batch in batches]
    assert [number for number in copies if number] == [3]


@pytest.mark.parametrize("preempts", [False, True])
def test_beams_go_on_from_copies_of_the_state(
    make_engine: Callable[..., Engine], plain: Callable[[list[int]], torch.Tensor], golden: Golden, preempts: bool
) -> None:
    engine = make_engine(preempts=preempts)
    options = BeamOptions(length_penalty=0.0, early_stopping=True)

    def best(ids: list[int]) -> TokenLogprobs:
        top = plain(ids)[-1].log_softmax(-1).topk(6)
        return TokenLogprobs(0.0, top.indices.tolist(), top.values.tolist())

    prompt = golden.prompts[1]
    results = run(
        engine,
        [AddRequest(TokensInput(prompt), SamplingParams(max_tokens=6), num_choices=3, beams=options, request_id=0)],
    )
    expected = plain_beam_search(best, prompt, 3, 6, (2, 3), options)
    assert [results[0, index].token_ids for index in range(3)] == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_decodes_run_in_graphs(
    make_engine: Callable[..., Engine], golden: Golden, place: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps in which each request has one token, whatever their number; others run eagerly between them."""
    if place == "alone":
        pytest.skip("the attention of these graphs has one group of layers")

    def caches(groups: tuple[CacheGroup[CacheSpec], ...], num_blocks: int, *sizes: object) -> Caches:
        made = make_caches(groups, num_blocks, *sizes)  # type: ignore[arg-type]
        return replace(made, attention=StaticBackend(paged_groups(groups), num_blocks, 8, 64))

    monkeypatch.setattr(startup, "StepGraphs", partial(StepGraphs, make_capture=RecordedCapture))
    monkeypatch.setattr(startup, "make_caches", caches)
    monkeypatch.setattr(warm_up, "_RECORDING_S", 60.0)
    engine = make_engine(overlap=overlap, max_num_seqs=6, max_num_batched_tokens=64, kv_cache_memory=400_000)
    forward, eager = ModelRunner.forward, []

    def watched(runner: ModelRunner, token_ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        eager.append(batch)
        return forward(runner, token_ids, batch)

    monkeypatch.setattr(ModelRunner, "forward", watched)
    adds = [greedy(number, prompt) for number, prompt in enumerate(golden.prompts[:8])]
    results = run(engine, [*adds, greedy(8, golden.prompts[1], logprobs=2)])
    assert [results[number, 0].token_ids for number in range(9)] == [*golden.outputs, golden.outputs[1]]
    assert eager and all(batch.num_tokens > batch.num_requests for batch in eager)
    assert engine.scheduler.counters.num_steps > len(eager) + NUM_OUTPUT_TOKENS


def test_a_step_is_not_launched_twice_over_a_state_that_it_may_have_changed(
    make_engine: Callable[..., Engine], golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    forward, num_calls = ModelRunner.forward, []

    def failing(*args: object) -> torch.Tensor:
        num_calls.append(1)
        if len(num_calls) == 3:
            raise torch.OutOfMemoryError
        return forward(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "forward", failing)
    results = run(engine, [greedy(0, golden.prompts[1])])
    assert results[0, 0].finish_reason is FinishReason.ERROR and len(num_calls) == 3
    assert run(engine, [greedy(1, golden.prompts[1])])[1, 0].token_ids == golden.outputs[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_refused_drafts_leave_no_trace_in_a_state(
    make_engine: Callable[..., Engine], golden: Golden, overlap: bool
) -> None:
    """Each prediction goes wrong once, behind a different number of right tokens, and is right again afterwards."""
    engine, adds = make_engine(overlap=overlap, speculative="ngram"), []
    for number, output in enumerate(golden.outputs):
        predicted = [*output[: number + 1], output[number + 1] ^ 1, *output[number + 2 :]]
        guidance = Guidance(prediction_token_ids=tuple(predicted))
        adds.append(msgspec.structs.replace(greedy(number, golden.prompts[number]), guidance=guidance))
    results = run(engine, adds)
    assert [results[number, 0].token_ids for number in range(8)] == golden.outputs
    counters = engine.scheduler.counters
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens


def test_states_may_be_changed_in_place() -> None:
    cache = StateCache({0: CacheGroup(StateSpec((2, 3), torch.float32), (4,))}, 3, CPU)
    batch = dummy_batch(3, [cache.groups[0].spec], 8, 1, max_model_len=1)
    batch = replace(batch, groups=(replace(batch.groups[0], block_tables=np.array([[2], [1], [3]])),))
    first = cache.begin(batch)
    assert first.is_new.tolist() == [True] * 3 and first.slots(4).tolist() == [2, 1, 3]
    first.tensor(4)[first.slots(4)] = torch.arange(18.0).view(3, 2, 3)
    assert first.read(4).count_nonzero() == 0  # whatever a slot holds, a new request has no state
    later = cache.begin(replace(batch, seq_lens=batch.seq_lens + 1))
    assert torch.equal(later.read(4), torch.arange(18.0).view(3, 2, 3))


def test_memory_for_states_is_set_aside_first(make_engine: Callable[..., Engine], place: str) -> None:
    engine = make_engine(max_num_seqs=20)
    runner = engine._executor
    assert isinstance(runner, ModelRunner) and runner._caches.states is not None
    states = runner._caches.states.states.values()
    assert [state.shape[0] for state in states] == [20 + 4 * 20 + 1] * (1 + (place == "alone"))
    with pytest.raises(ModelError, match=r"no memory is left for the KV cache: 4 kB, a block takes .* 20 requests"):
        make_engine(kv_cache_memory=4_000, max_num_seqs=20)
