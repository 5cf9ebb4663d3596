"""The whole model that a configuration describes, block by block, with what reads or adds between them.

Every module of this folder is imported, so that each part makes known what it describes.
"""

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine import parts
from weft.engine.describe import specs
from weft.engine.describe.config import ModelConfig
from weft.engine.describe.specs import BlockSpec, FeedForwardSpec, NormSpec
from weft.engine.describe.tensor_names import (
    attention_spec,
    dense_spec,
    extended_spec,
    feed_forward_spec,
    mixer_spec,
    norm_spec,
)
from weft.engine.families.switches import Halves, Norms
from weft.engine.layers.block import Block, BlockStep
from weft.engine.layers.kernels import LayerKernels
from weft.engine.parts.cross_attention import with_cross_attention
from weft.engine.parts.hearing import hearing_spec
from weft.engine.parts.stacked import StackedSpec
from weft.engine.weights.reader import TensorRef, WeightReader, WeightRef

for _module in pkgutil.iter_modules(parts.__path__):
    if _module.name != __name__.rpartition(".")[2]:
        importlib.import_module(f"{parts.__name__}.{_module.name}")


def decoder_spec(config: ModelConfig) -> specs.DecoderSpec:
    """The parts of the model."""
    hidden, vocabulary, switches = config.hidden_size, (config.vocab_size,), config.switches
    names, head = switches.names, None
    if not config.tie_word_embeddings:
        head = WeightRef((names.head,), (config.vocab_size - switches.num_unwritten_ids,), hidden, switches.head_bias)
    positions = token_types = None
    if names.positions:
        num_positions = config.num_positions + switches.num_positions_skipped
        positions = WeightRef((names.positions,), (num_positions,), hidden)
    if names.token_types:
        token_types = WeightRef((names.token_types,), (config.num_token_types,), hidden)
    blocks = [block_spec(config, index, f"{names.layers}.{index}") for index in range(config.num_layers)]
    spec = specs.DecoderSpec(
        embedding=None if switches.hearing else WeightRef((names.embedding,), vocabulary, hidden),
        blocks=tuple(_with_others(blocks, config)),
        norm=norm_spec(config, names.norm) if switches.has_final_norm else None,
        head=head,
        positions=positions,
        embedding_norm=norm_spec(config, names.embedding_norm) if names.embedding_norm else None,
        token_types=token_types,
        logit_bias=TensorRef(switches.logit_bias, (1, *vocabulary), dtype=torch.float32)
        if switches.logit_bias
        else None,
        front=hearing_spec(switches.hearing) if switches.hearing else None,
    )
    if config.encoder is not None:
        return with_cross_attention(config, spec, decoder_spec(config.encoder))
    return extended_spec(switches.extension, config, spec) if switches.extension else spec


def block_spec(config: ModelConfig, index: int, layer: str) -> specs.BlockSpec:
    """A block like that of the layer at an index, under the name of a layer."""
    switches, names, norms = config.switches, config.switches.names, config.switches.norms
    before = norms not in (Norms.AFTER, Norms.OF_SUM)
    after = norms in (Norms.AFTER, Norms.AROUND)
    has_first = before and index not in switches.normless
    first = norm_spec(config, f"{layer}.{names.mixer_norm}") if has_first else None
    halves = switches.halves[index] if switches.halves else Halves.BOTH
    if halves is Halves.MIXER:
        return specs.PreNormSpec(first, _mixer(config, layer, index, None), None, None)
    if halves is Halves.FEED_FORWARD:
        return specs.PreNormSpec(None, None, first, _feed_forward(config, layer, index, None))
    second = norm_spec(config, f"{layer}.{names.feed_forward_norm}") if before and names.feed_forward_norm else None
    mixer = _mixer(config, layer, index, norm_spec(config, f"{layer}.{names.mixer_post_norm}") if after else None)
    post_norm = norm_spec(config, f"{layer}.{names.feed_forward_post_norm}") if after else None
    feed_forward = _feed_forward(config, layer, index, post_norm)
    if norms is Norms.OF_SUM:
        mixer_norm, last = (f"{layer}.{name}" for name in (names.mixer_post_norm, names.feed_forward_post_norm))
        return specs.PostNormSpec(mixer, norm_spec(config, mixer_norm), feed_forward, norm_spec(config, last))
    if norms is Norms.PARALLEL:
        assert first is not None
        return specs.ParallelSpec(first, mixer, second, feed_forward)
    return specs.PreNormSpec(first, mixer, second, feed_forward)


def _mixer(config: ModelConfig, layer: str, index: int, post_norm: NormSpec | None) -> specs.MixerSpec:
    chosen = config.switches.mixers[index] if config.switches.mixers else None
    return mixer_spec(chosen, config, layer, post_norm) if chosen else attention_spec(config, layer, index, post_norm)


def _feed_forward(config: ModelConfig, layer: str, index: int, post_norm: NormSpec | None) -> FeedForwardSpec:
    chosen = config.switches.feed_forwards[index] if config.switches.feed_forwards else None
    return feed_forward_spec(chosen, config, layer, post_norm) if chosen else dense_spec(config, layer, post_norm)


@dataclass(frozen=True, slots=True)
class Tap(Block):
    """Changes nothing. It keeps hidden states for a head, in a copy, since later blocks add to them in place."""

    depth: int

    @override
    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        step.caches.tapped[self.depth] = hidden.clone()
        return hidden if step.rows is None else hidden[step.rows]


@dataclass(frozen=True, slots=True)
class TapSpec(BlockSpec):
    """`Tap` behind so many layers."""

    depth: int

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Block:
        return Tap(self.depth)


def _with_others(blocks: Sequence[BlockSpec], config: ModelConfig) -> Iterator[BlockSpec]:
    """The blocks, and behind some what adds features of pictures, and taps."""
    for depth, block in enumerate(blocks, 1):
        yield block
        if depth <= config.num_stacked:
            yield StackedSpec(depth - 1)
        if depth in config.tapped:
            yield TapSpec(depth)
