"""The layers of a decoder that reads an encoder: each attends to the input between its two usual halves.

See Vaswani et al., 2017, section 3.2.3. `weft.engine.layers.encoder_decoder` says where keys and values are.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from typing_extensions import override

from weft.engine.cache.specs import PagedKV
from weft.engine.describe.config import ModelConfig
from weft.engine.describe.cut import Cut
from weft.engine.describe.specs import BlockSpec, DecoderSpec, MixerSpec, OutputSpec, PostNormSpec, PreNormSpec
from weft.engine.describe.tensor_names import norm_spec, output_spec
from weft.engine.layers.block import BlockStep, Linear, Mixer
from weft.engine.layers.encoder_decoder import SCORES, InputCaches
from weft.engine.layers.kernels import LayerKernels
from weft.engine.weights.reader import WeightReader, WeightRef


@dataclass(frozen=True, slots=True)
class CrossAttention(Mixer):
    """Attention to the input.

    Attributes:
        queries: (num_heads * head_dim, hidden_size), of the decoder's tokens.
        keys_values: Both stacked, (2 * num_kv_heads * head_dim, hidden_size), of the encoder's result.
        cache: Index of the layer's cache.
        aligned: Heads whose scores are passed on where `EncoderDecoder` asks for them.
    """

    queries: Linear
    keys_values: Linear
    o: Linear
    head_dim: int
    cache: int
    aligned: tuple[int, ...] = ()

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        assert isinstance(step.caches, InputCaches)
        cross = step.caches.encoder.cross
        queries = self.queries(normed).view(len(normed), -1, self.head_dim)
        if encoded := step.caches.passed.get("encoded"):
            keys, values = self.keys_values(encoded[0]).view(len(encoded[0]), 2, -1, self.head_dim).unbind(1)
            cross.write(self.cache, keys, values)
            if self.aligned and step.caches.encoder.rows_of:
                step.caches.passed[SCORES] += (self._scores(queries, keys, step.caches.encoder.rows_of),)
        return cross.read(self.cache, queries).reshape(len(normed), -1)

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.o.add_to(residual, mixed)

    def _scores(self, queries: torch.Tensor, keys: torch.Tensor, rows_of: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """(num_own_tokens, num_aligned_heads * num_positions) of tokens whose input is read in this step, else 0."""
        queries, keys = (torch.stack([of[:, head] for head in self.aligned]).float() for of in (queries, keys))
        scores = queries.new_zeros((queries.size(1), len(queries), keys.size(1) // len(rows_of)))
        for rows, own in zip(rows_of, keys.chunk(len(rows_of), 1), strict=True):
            scores[rows] = (queries[:, rows] @ own.mT * self.head_dim**-0.5).transpose(0, 1)
        return scores.flatten(1)


@dataclass(frozen=True, slots=True)
class CrossSpec(MixerSpec):
    """`CrossAttention` in the cache of the layer's own attention, whose index is `source`."""

    queries: WeightRef
    keys_values: WeightRef
    output: OutputSpec
    head_dim: int
    source: int
    aligned: tuple[int, ...] = ()

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Mixer:
        queries, keys_values = kernels.linear(self.queries, reader), kernels.linear(self.keys_values, reader)
        output = self.output.build(kernels, reader)
        return CrossAttention(queries, keys_values, output, self.head_dim, self.source, self.aligned)

    @override
    def cut(self, cut: Cut) -> Self:
        cache, size, (kv_size, _) = cut.caches[self.source], self.queries.out_features, self.keys_values.sizes
        num_heads, num_kv_heads = size // self.head_dim, kv_size // self.head_dim
        if not isinstance(cache, PagedKV) or not cut.divides_heads(num_heads, num_kv_heads):
            return self
        queries = cut.by_outputs(self.queries, (size, num_heads))
        keys_values = cut.by_outputs(self.keys_values, *[(kv_size, num_kv_heads)] * 2)
        return replace(self, queries=queries, keys_values=keys_values, output=self.output.cut(cut), aligned=())


def with_cross_attention(config: ModelConfig, spec: DecoderSpec, encoder: DecoderSpec) -> DecoderSpec:
    """The decoder of these blocks, in each of which attention to the encoder's result precedes the last half.

    An encoder that has the decoder's embedding leaves it out.
    """
    if encoder.embedding == spec.embedding:
        encoder = replace(encoder, embedding=None)
    blocks = tuple(half for index, block in enumerate(spec.blocks) for half in _halves(config, block, index))
    return replace(spec, blocks=blocks, encoder=encoder)


def _halves(config: ModelConfig, block: BlockSpec, index: int) -> tuple[BlockSpec, BlockSpec]:
    layer, names = f"{config.switches.names.layers}.{index}", config.switches.names
    norm, cross = norm_spec(config, f"{layer}.{names.cross_norm}"), _cross_spec(config, layer, index)
    match block:
        case PreNormSpec():
            first = replace(block, feed_forward_norm=None, feed_forward=None)
            return first, replace(block, mixer_norm=norm, mixer=cross)
        case PostNormSpec():
            first_post = replace(block, feed_forward=None, feed_forward_norm=None)
            return first_post, replace(block, mixer=cross, mixer_norm=norm)
    raise TypeError(f"blocks of {type(block).__name__} cannot read an encoder")


def _cross_spec(config: ModelConfig, layer: str, index: int) -> CrossSpec:
    names, switches, dim, encoder = config.switches.names, config.switches, config.head_dim, config.encoder
    assert encoder is not None
    queries, keys, values = (f"{layer}.{name}" for name in names.cross_qkv)
    size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    has_bias = switches.qkv_bias
    output_bias = has_bias if switches.o_bias is None else switches.o_bias
    return CrossSpec(
        WeightRef((queries,), (size,), config.hidden_size, has_bias),
        WeightRef(
            (keys, values),
            (kv_size, kv_size),
            encoder.hidden_size,
            has_bias,
            biasless=() if switches.key_bias else (keys,),
        ),
        output_spec(
            config,
            WeightRef((f"{layer}.{names.cross_output}",), (config.hidden_size,), size, output_bias),
            norm_spec(config, f"{layer}.{names.cross_post_norm}") if names.cross_post_norm else None,
        ),
        dim,
        index,
        tuple(head for layer_index, head in config.aligned if layer_index == index),
    )
