"""Runs attention or a block of a model with random tensors of its shapes, through the code that serves.

Each kind of trial makes a candidate from a configuration that names it, and a reference in float32 by torch. Inputs are
made when the first candidate needs them, the same for all.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import msgspec
import torch
from torch import Tensor
from typing_extensions import override

from weft.engine.batch import Batch
from weft.engine.cache.specs import CacheGroup, CacheSpec, PagedKV, group_layers
from weft.engine.config import EngineConfig
from weft.engine.describe.config import ModelConfig
from weft.engine.describe.specs import BlockSpec, DecoderSpec, PreNormSpec
from weft.engine.device import to_device
from weft.engine.families.switches import QKNorm
from weft.engine.kernels.choice import ATTENTION, choose_kernels, make_backend, make_caches
from weft.engine.kernels.torch.layer_kernels import TorchKernels
from weft.engine.layers.block import AttentionStep, BlockStep, HeadLayer, run_blocks
from weft.engine.layers.feed_forward import choose
from weft.engine.layers.kernels import LayerKernels
from weft.engine.layers.norm import HeadNorm
from weft.engine.models.cut import shard
from weft.engine.models.loading import make_rotaries
from weft.engine.parts.decoder import decoder_spec
from weft.engine.parts.experts import ExpertsBesideSpec, ExpertsSpec
from weft.engine.parts.layer_inputs import LayeredSpec
from weft.engine.runner.dummy_batch import dummy_batch
from weft.engine.tune.compare import Judge, Trial, relative_errors
from weft.engine.weights.reader import DenseReader, Part
from weft.engine.weights.tensor_files import RandomSource


class Trials(Protocol):
    """A part of the model, and the inputs that it is tried with."""

    def trial(self, config: EngineConfig) -> Trial:
        """Make what a configuration names; raises what keeps it from being used."""

    def reference(self) -> Judge:
        """Compute what is right."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step in which num_requests requests, which have num_cached tokens in the cache, compute num_new each."""

    num_requests: int
    num_cached: int
    num_new: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.num_requests * self.num_new


class _Steps:
    """Steps that follow each other, and the random inputs of each; the last one is timed."""

    def __init__(
        self, shapes: Sequence[StepShape], specs: Sequence[CacheSpec], model: ModelConfig, config: EngineConfig
    ) -> None:
        self._device, self._dtype = config.device, config.dtype
        capacity = max(shape.num_cached + shape.num_new for shape in shapes)
        self.batches = [
            dummy_batch(
                shape.num_tokens,
                specs,
                config.block_size,
                1,
                shape.num_new,
                num_cached=shape.num_cached,
                capacity=capacity,
            )
            for shape in shapes
        ]
        self.num_blocks = max(int(g.block_tables.max()) for batch in self.batches for g in batch.groups) + 1
        self._rotaries = make_rotaries(model, capacity, config.dtype, config.device)

    def rotations(self, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """See `BlockStep`."""
        positions = to_device(batch.positions, self._device)
        return tuple(rotary.gather(positions).to(dtype) for rotary in self._rotaries)

    def random(self, *sizes: int) -> list[Tensor]:
        """Normal values for each step: (num_tokens, *sizes) in the model's dtype."""
        generator = torch.Generator(self._device).manual_seed(len(sizes))
        return [
            torch.randn(batch.num_tokens, *sizes, generator=generator, device=self._device).to(self._dtype)
            for batch in self.batches
        ]


class AttentionTrials(Trials):
    """Heads and attention of one layer of each kind that the model has; all are timed together."""

    def __init__(self, model: ModelConfig, config: EngineConfig, shapes: Sequence[StepShape]) -> None:
        """Take the steps that are computed one after the other, of which the last one is timed."""
        self._model, self._config, self._shapes = model, config, shapes
        self._groups = tuple(CacheGroup(spec, (index,)) for index, spec in enumerate(paged_specs(model, config)))

    @override
    def trial(self, config: EngineConfig) -> Trial:
        return self._trial(config, config.dtype)

    @override
    def reference(self) -> Judge:
        config = _reference_config(self._config)
        exact = self._trial(config, config.dtype).outputs()
        if self._config.rounded_kv != torch.float8_e4m3fn:
            return relative_errors(exact)
        # Who attends to a step's own K/V need not round them.
        return relative_errors(self._trial(config, self._config.kv_cache_dtype).outputs(), exact)

    def _trial(self, config: EngineConfig, rounded: torch.dtype) -> Trial:
        """Attend with the kernels of config, to K/V that are first rounded to a dtype."""
        kernels = choose_kernels(self._model, config)
        backend = make_backend(self._groups, self._steps.num_blocks, config, self._model.num_heads)
        heads, dtype = [self._heads(kernels, config.dtype, group.spec) for group in self._groups], config.dtype
        last: list[AttentionStep] = []

        def outputs() -> list[Tensor]:
            attended = []
            for batch, inputs in zip(self._steps.batches, self._inputs, strict=True):
                last[:] = [backend.begin(batch)]
                attended += self._attend(last[0], heads, inputs, self._rotations(batch, dtype), rounded)
            return attended

        rotations = self._rotations(self._steps.batches[-1], dtype)
        return Trial(outputs, lambda: self._attend(last[0], heads, self._inputs[-1], rotations, rounded))

    @cached_property
    def _steps(self) -> _Steps:
        return _Steps(self._shapes, [group.spec for group in self._groups], self._model, self._config)

    @cached_property
    def _inputs(self) -> list[tuple[Tensor, ...]]:
        """Queries, keys and values of each group, stacked, for each step."""
        sizes = [(num_heads(self._model, g.spec) + 2 * g.spec.num_kv_heads, g.spec.head_dim) for g in self._groups]
        return list(zip(*(self._steps.random(*size) for size in sizes), strict=True))

    def _rotations(self, batch: Batch, dtype: torch.dtype) -> list[Tensor]:
        """For each group a rotation of its heads' size; that of latents is not used."""
        first, *others = self._steps.rotations(batch, dtype)
        by_size = {rotation.size(-1): rotation for rotation in (*others, first)}
        return [by_size.get(group.spec.head_dim, first) for group in self._groups]

    def _heads(self, kernels: LayerKernels, dtype: torch.dtype, spec: PagedKV) -> HeadLayer:
        model, norm = self._model, None
        kind = model.switches.qk_norm
        if kind and dataclasses.replace(kind, offset=0.0) == QKNorm():  # others are torch's, whatever is settled
            generator = torch.Generator().manual_seed(0)
            weights = 1 + torch.randn(2, spec.head_dim, generator=generator) / 8
            weights *= _head_norm(spec)
            if not kind.offset:  # the sum of a weight and an offset keeps float32
                weights = weights.to(self._config.dtype).to(dtype)
            queries, keys = weights.to(self._config.device).unbind(0)
            norm = HeadNorm(queries, keys, num_heads(model, spec), spec.num_kv_heads, model.rms_norm_eps)
        return kernels.heads(norm, num_heads(model, spec), spec.num_kv_heads)

    def _attend(
        self,
        step: AttentionStep,
        heads: Sequence[HeadLayer],
        inputs: tuple[Tensor, ...],
        rotations: Sequence[Tensor],
        rounded: torch.dtype,
    ) -> list[Tensor]:
        attended = []
        for group, prepare, stacked, rotation in zip(self._groups, heads, inputs, rotations, strict=True):
            (layer,), num_queries, dtype = group.layers, num_heads(self._model, group.spec), rotation.dtype
            qkv = stacked.to(dtype, copy=True)
            if group.spec.latent_dim is None:
                queries, *cached = prepare(qkv, rotation, step.cache(layer))
            else:
                queries, latents = qkv[:, :num_queries], qkv[:, num_queries:][:, :1]
                cached = [latents, latents[..., : group.spec.latent_dim]]
            keys, values = (part.to(rounded).to(dtype) for part in cached)
            attended.append(step.attend(layer, (queries, keys, values)).clone())
        return attended


@dataclasses.dataclass(frozen=True, slots=True)
class _SteadyRouting:
    """Chooses experts by the place of a token. By scores, rounding alone may change a choice, and then all outputs."""

    num_chosen: int


@choose.register
def _choose_by_place(routing: _SteadyRouting, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Shares still follow from logits."""
    num_tokens, num_experts = logits.shape
    places = torch.arange(num_tokens * routing.num_chosen, device=logits.device) % num_experts
    ids = places.view(num_tokens, routing.num_chosen)
    return ids, logits.gather(1, ids).softmax(-1)


def with_steady_routing(block: BlockSpec) -> BlockSpec:
    """The same block; its experts, if it has some, are chosen by the places of tokens."""
    if not isinstance(block, PreNormSpec):
        return block
    match block.feed_forward:
        case ExpertsSpec() as experts:
            return dataclasses.replace(block, feed_forward=_steady(experts))
        case ExpertsBesideSpec(experts=experts) as both:
            return dataclasses.replace(block, feed_forward=dataclasses.replace(both, experts=_steady(experts)))
    return block


def _steady(experts: ExpertsSpec) -> ExpertsSpec:
    return dataclasses.replace(experts, routing=_SteadyRouting(experts.routing.num_chosen))


class BlockTrials(Trials):
    """One block of the model, with random weights."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, shapes: Sequence[StepShape], are_separate: bool = False
    ) -> None:
        """Take the steps that are computed one after the other.

        Args:
            are_separate: Each step has caches of its own, and all are timed; else the last one is.
        """
        self._model, self._config, self._shapes = model, config, shapes
        self._are_separate = are_separate
        self._spec = tried_block(model, config)

    @override
    def trial(self, config: EngineConfig) -> Trial:
        return self._trial(choose_kernels(self._model, config), config)

    @override
    def reference(self) -> Judge:
        return relative_errors(self._trial(TorchKernels(), _reference_config(self._config)).outputs())

    def _trial(self, kernels: LayerKernels, config: EngineConfig) -> Trial:
        source = RandomWeights(0, self._config.dtype, config.device, 1.0 - self._model.switches.norm_offset)
        source.head_norm = next((_head_norm(s) for s in self._spec.caches if isinstance(s, PagedKV)), 1.0)
        reader = DenseReader(source, config.device, config.dtype, 0)
        blocks = kernels.fuse([self._spec.build(kernels, reader, 0)])
        groups = group_layers(self._spec.caches)
        num_caches = len(self._shapes) if self._are_separate else 1
        sizes = self._steps.num_blocks, config, self._model.num_heads
        caches = itertools.cycle([make_caches(groups, *sizes) for _ in range(num_caches)])
        timed: list[tuple[Tensor, BlockStep]] = []

        def outputs() -> list[Tensor]:
            changes = []
            for batch, inputs in zip(self._steps.batches, self._inputs, strict=True):
                step = BlockStep(self._steps.rotations(batch, config.dtype), next(caches).begin(batch))
                hidden = inputs.to(config.dtype, copy=True)
                changes.append(run_blocks(blocks, hidden, step).float() - inputs.float())
                timed.append((inputs, step))
            return changes

        return Trial(outputs, lambda: [run_blocks(blocks, *step) for step in timed[-num_caches:]])

    @cached_property
    def _steps(self) -> _Steps:
        return _Steps(self._shapes, [g.spec for g in group_layers(self._spec.caches)], self._model, self._config)

    @cached_property
    def _inputs(self) -> list[Tensor]:
        return self._steps.random(self._model.hidden_size)


def tried_spec(model: ModelConfig, config: EngineConfig) -> DecoderSpec:
    """What this process computes: of several ranks its part, without the sums, for which others must run.

    A decoder is tried without its encoder, whose result steps here do not have, and without what lies beside heads.
    Scores are scaled as usual where a bias goes with weights for scores that are not; larger ones magnify rounding.
    """
    switches = model.switches
    if switches.bias is not None:
        switches = dataclasses.replace(switches, bias=None, attention_scale=None)
    model = dataclasses.replace(model, encoder=None, switches=switches)
    return shard(decoder_spec(model), config.rank, config.options.tensor_parallel_size, has_sums=False)


def tried_blocks(model: ModelConfig, config: EngineConfig) -> list[BlockSpec]:
    """All blocks, without inputs for each layer; experts are chosen steadily."""
    blocks = (spec.block if isinstance(spec, LayeredSpec) else spec for spec in tried_spec(model, config).blocks)
    return [with_steady_routing(block) for block in blocks]


def tried_block(model: ModelConfig, config: EngineConfig) -> BlockSpec:
    """The first block with a cache and experts, or else the first with a cache."""
    blocks = [block for block in tried_blocks(model, config) if block.caches]
    return next(filter(experts_of, blocks), blocks[0])


def experts_of(block: BlockSpec) -> ExpertsSpec | None:
    """The experts of its feed-forward layer; None without."""
    match block:
        case PreNormSpec(feed_forward=ExpertsSpec() as experts):
            return experts
        case PreNormSpec(feed_forward=ExpertsBesideSpec(experts=experts)):
            return experts
    return None


def paged_specs(model: ModelConfig, config: EngineConfig) -> tuple[PagedKV, ...]:
    """The kinds of attention that this process computes."""
    return tuple(dict.fromkeys(spec for spec in tried_spec(model, config).caches if isinstance(spec, PagedKV)))


def num_heads(model: ModelConfig, spec: PagedKV) -> int:
    """Query heads of a kind of attention."""
    return spec.num_heads or model.num_heads


def _head_norm(spec: PagedKV) -> float:
    """The weight of norms of heads that makes scores of the usual size; larger ones would magnify rounding."""
    return 1 / math.sqrt(spec.score_scale * math.sqrt(spec.head_dim))


def _reference_config(config: EngineConfig) -> EngineConfig:
    """The same in float32 by torch."""
    options = msgspec.structs.replace(config.options, deterministic=False, quantization="none")
    kernels = {**dict.fromkeys(ATTENTION, "torch"), "layers": "torch", "norm_and_activation": "torch"}
    return dataclasses.replace(config, options=options, dtype=torch.float32, rounded_kv=None, kernels=kernels)


class RandomWeights(RandomSource):
    """Matrices that keep the size of their inputs, so that every part of a block counts, and norms that vary.

    What skips the sums of a state space outweighs them, since they magnify rounding.
    """

    _POOL_SIZE = (1 << 18) + 1
    head_norm = 1.0

    @override
    def fill(self, name: str, target: Tensor, item: tuple[int, int] | None = None, part: Part | None = None) -> None:
        is_skip = name.endswith(".D")
        if is_skip or name.endswith("norm.weight") or (name.endswith(".weight") and target.dim() == 1):
            values = torch.empty(target.shape, dtype=self._pool.dtype, device=target.device)
            super().fill(name.removesuffix(".weight"), values)
            size = self.head_norm if name.endswith(("q_norm.weight", "k_norm.weight")) else 16.0 if is_skip else 1.0
            target.copy_(values.mul_(8).add_(self._norm_weight).mul_(size))
            return
        super().fill(name, target, item, part)
        if target.dim() > 1:  # a power of two changes no digit, so that all dtypes hold the same values
            target.mul_(2.0 ** round(math.log2(50 / math.sqrt(target[0].numel()))))
