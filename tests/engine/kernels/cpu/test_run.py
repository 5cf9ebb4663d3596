"""All layers in one call: bit for bit what their parts give one by one."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.engine.given_weights import given
from tests.engine.paged import PagedRequests
from weft.engine.batch import Batch
from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.cpu.attention import NativeBackend, NativeStep
from weft.engine.kernels.cpu.block_run import NativeRun
from weft.engine.kernels.cpu.layer_kernels import CpuKernels, WeightStorage
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.torch.caches import TorchStateStep
from weft.engine.layers.block import (
    Attention,
    BlockStep,
    GatedFeedForward,
    Heads,
    Linear,
    Mixer,
    PreNormBlock,
    StepCaches,
    run_blocks,
)
from weft.engine.layers.norm import HeadNorm
from weft.engine.layers.recurrence import StateSpace
from weft.engine.layers.rotary import RopeConfig, RotaryTable
from weft.engine.layers.wrapped_linear import LinearWithEpilogue
from weft.engine.parts.mamba import Mamba2Mixer, ParallelMixers

CPU = torch.device("cpu")
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 48, 66, 4, 2, 32
NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS = 60, 16, 3
WINDOWS = (None, 20, None)
SPACE_HEADS, STATE_SIZE, KERNEL = 3, 16, 4


@dataclass(frozen=True)
class Kind:
    """What layers may differ in."""

    storage: WeightStorage = "bfloat16"
    has_head_norm: bool = True
    has_bias: bool = False
    has_mamba: bool = False
    has_output_norms: bool = False
    activation: str = "silu"


def make_mamba(kernels: CpuKernels, weight: Callable[..., torch.Tensor], cache: int, *, has_norm: bool) -> Mamba2Mixer:
    width, channels = SPACE_HEADS * HEAD_DIM, SPACE_HEADS * HEAD_DIM + 2 * STATE_SIZE
    parameters = (-torch.rand(SPACE_HEADS), torch.randn(SPACE_HEADS), torch.randn(SPACE_HEADS))
    return Mamba2Mixer(
        kernels.linear(*given(weight(width + channels + SPACE_HEADS, HIDDEN), None)),
        (width, channels, SPACE_HEADS),
        kernels.convolution(weight(channels, KERNEL), torch.randn(channels), has_silu=True),
        kernels.state_space(StateSpace(HEAD_DIM, STATE_SIZE, 1, *parameters)),
        kernels.norm(torch.rand(width).bfloat16(), 1e-4) if has_norm else None,
        kernels.linear(*given(weight(HIDDEN, width), None)),
        cache,
    )


def make_states(num_requests: int) -> dict[int, torch.Tensor]:
    """Caches of the mixers of `make_mamba`, behind those of attention."""
    shapes = (SPACE_HEADS * HEAD_DIM + 2 * STATE_SIZE, KERNEL - 1), (SPACE_HEADS, HEAD_DIM, STATE_SIZE)
    return {
        NUM_LAYERS + 2 * layer + index: torch.zeros(num_requests + 1, *shape)
        for layer in range(NUM_LAYERS)
        for index, shape in enumerate(shapes)
    }


def begin_states(states: dict[int, torch.Tensor], batch: Batch) -> TorchStateStep:
    slots = torch.arange(batch.num_requests, 0, -1)
    is_new = torch.from_numpy(batch.seq_lens == np.diff(batch.query_start_locs))
    return TorchStateStep(states, dict.fromkeys(states, slots), is_new, batch.query_start_locs)


def make_block(kernels: CpuKernels, kind: Kind, index: int, inner: int = INNER) -> PreNormBlock:
    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * shape[-1] ** -0.5).bfloat16()

    def bias(size: int) -> torch.Tensor | None:
        return torch.randn(size).bfloat16() if kind.has_bias else None

    def scale(size: int) -> torch.Tensor:
        weight = 1 + torch.randn(size) / 4
        return weight if kind.has_output_norms else weight.bfloat16()  # Gemma adds 1 to its weights in float32

    def output(size: int) -> Linear:
        linear = kernels.linear(*given(weight(HIDDEN, size), bias(HIDDEN)))
        return LinearWithEpilogue(linear, kernels.norm(scale(HIDDEN), 1e-6)) if kind.has_output_norms else linear

    norm = HeadNorm(scale(HEAD_DIM), scale(HEAD_DIM), HEADS, KV_HEADS, 1e-5) if kind.has_head_norm else None
    num_values = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    attention = Attention(
        qkv=kernels.linear(*given(weight(num_values, HIDDEN), bias(num_values))),
        heads=kernels.heads(norm, HEADS, KV_HEADS),
        output=output(HEADS * HEAD_DIM),
        head_dim=HEAD_DIM,
        cache=index,
    )
    mixer: Mixer = attention
    if kind.has_mamba:
        mamba = make_mamba(kernels, weight, NUM_LAYERS + 2 * index, has_norm=kind.storage != "bfloat16")
        mixer = ParallelMixers((attention, mamba), (HEADS * HEAD_DIM, SPACE_HEADS * HEAD_DIM))
    feed_forward = GatedFeedForward(
        gated=kernels.gated(*given(weight(2 * inner, HIDDEN)), kind.activation),
        down=output(inner),
    )
    return PreNormBlock(kernels.norm(scale(HIDDEN), 1e-6), mixer, kernels.norm(scale(HIDDEN), 1e-6), feed_forward)


def make_backend(library: NativeLibrary) -> NativeBackend:
    groups = tuple(
        CacheGroup(PagedKV(KV_HEADS, HEAD_DIM, window), tuple(i for i, w in enumerate(WINDOWS) if w == window))
        for window in dict.fromkeys(WINDOWS)
    )
    return NativeBackend(groups, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, CPU, library)


@pytest.mark.parametrize(
    "kind",
    [
        *(Kind(), Kind(storage="int8"), Kind(storage="int4"), Kind(has_head_norm=False), Kind(has_bias=True)),
        *(Kind(storage="int8", has_bias=True), Kind(has_mamba=True), Kind(storage="int8", has_mamba=True)),
        *(Kind(activation="gelu"), Kind(has_output_norms=True, activation="gelu_pytorch_tanh")),
        Kind(storage="int4", has_output_norms=True, has_mamba=True),
    ],
    ids=lambda kind: str(kind),
)
@pytest.mark.parametrize("rows", ["all", "some", "none"])
def test_one_call_is_bit_for_bit_what_the_parts_are(library: NativeLibrary, kind: Kind, rows: str) -> None:
    torch.manual_seed(0)
    kernels = CpuKernels(library, kind.storage)
    blocks = [make_block(kernels, kind, index) for index in range(NUM_LAYERS)]
    fused = kernels.fuse(blocks)
    assert [type(block) for block in fused] == [NativeRun]
    backends = make_backend(library), make_backend(library)
    states = make_states(3), make_states(3)
    rotary = RotaryTable(RopeConfig(theta=1e4), HEAD_DIM, 200, torch.bfloat16, CPU)
    paged = PagedRequests(NUM_BLOCKS, BLOCK_SIZE, tuple(dict.fromkeys(WINDOWS)))
    requests = [paged.add(np.zeros(num_tokens, np.int64)) for num_tokens in (90, 33, 40)]
    for counts in ((60, 30, 1), (1, 1, 1), (29, 1, 38)):
        batch = paged.make_batch(list(zip(requests, counts, strict=True)))
        some, no = torch.tensor([0, 2, batch.num_tokens - 1]), torch.tensor([]).long()
        wanted = {"all": None, "some": some, "none": no}[rows]
        hidden = torch.randn(batch.num_tokens, HIDDEN).bfloat16()
        rotation = rotary.gather(torch.from_numpy(batch.positions))
        ours, parts = (
            run_blocks(
                layers,
                hidden.clone(),
                BlockStep((rotation,), StepCaches(backend.begin(batch), begin_states(kept, batch)), wanted),
            )
            for layers, backend, kept in zip((fused, blocks), backends, states, strict=True)
        )
        assert ours.isfinite().all() and len(ours) == len(hidden if wanted is None else wanted)
        assert ours.equal(parts)
        for index in range(NUM_LAYERS):
            assert backends[0]._caches[index].equal(backends[1]._caches[index])
        assert all(ours.equal(states[1][index]) for index, ours in states[0].items())
        assert kind.has_mamba == bool(states[0][NUM_LAYERS].any())


def test_blocks_that_are_not_alike_stay_apart(library: NativeLibrary) -> None:
    """A run ends at a part that is not native, and where a size changes."""
    kernels = CpuKernels(library)
    blocks = [make_block(kernels, Kind(), index) for index in range(2)]
    blocks.append(make_block(kernels, Kind(activation="relu"), 2))
    blocks += [make_block(kernels, Kind(), 3), make_block(kernels, Kind(), 4, inner=2 * INNER)]
    assert [type(block) for block in kernels.fuse(blocks)] == [NativeRun, PreNormBlock, NativeRun, NativeRun]


class Passing:
    """Gives the queries back."""

    def cache(self, layer: int) -> None:
        """There is none."""

    def attend(
        self, layer: int, heads: Heads, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return heads[0]


def test_attention_of_another_kind_is_called_block_by_block(library: NativeLibrary) -> None:
    torch.manual_seed(0)
    kernels = CpuKernels(library)
    blocks = [make_block(kernels, Kind(), index) for index in range(2)]
    assert not isinstance(Passing(), NativeStep)
    hidden, rotation = torch.randn(5, HIDDEN).bfloat16(), torch.randn(5, 2, HEAD_DIM).bfloat16()
    step = BlockStep((rotation,), StepCaches(Passing()))
    assert run_blocks(kernels.fuse(blocks), hidden.clone(), step).equal(run_blocks(blocks, hidden.clone(), step))
