"""Which parts, under which names of tensors, a configuration describes.

What most models have is described here. Other switches of a family are described by the parts that they stand for: each
registers a function for its kind of switches with `mixer_spec`, `feed_forward_spec` or `extended_spec`.
"""

from dataclasses import replace
from functools import singledispatch
from math import prod

import torch

from weft.engine.cache.specs import PagedKV
from weft.engine.describe import specs
from weft.engine.describe.config import ModelConfig
from weft.engine.describe.specs import AttentionSpec, DenseSpec, MixerSpec, NormSpec
from weft.engine.families.hybrids import ScaledDense
from weft.engine.families.switches import (
    DecoderSwitches,
    FeedForwardSwitches,
    Fused,
    MixerSwitches,
    Norm,
    QKNorm,
    SizedFeedForward,
)
from weft.engine.layers.rotary import head_order
from weft.engine.weights.reader import RowOrder, TensorRef, WeightRef


@singledispatch
def mixer_spec(switches: MixerSwitches, config: ModelConfig, layer: str, output_norm: NormSpec | None) -> MixerSpec:
    """The mixer of the layer of this name; output_norm is that of what it adds, None for none."""
    raise TypeError(f"no mixer is described by {type(switches).__name__}")


@singledispatch
def feed_forward_spec(
    switches: FeedForwardSwitches, config: ModelConfig, layer: str, output_norm: NormSpec | None
) -> specs.FeedForwardSpec:
    """The feed-forward layer of the layer of this name; output_norm is that of what it adds, None for none."""
    raise TypeError(f"no feed-forward layer is described by {type(switches).__name__}")


@singledispatch
def extended_spec(switches: DecoderSwitches, config: ModelConfig, spec: specs.DecoderSpec) -> specs.DecoderSpec:
    """The whole decoder, of which spec has the blocks that all families have."""
    raise TypeError(f"no decoder is described by {type(switches).__name__}")


def norm_spec(config: ModelConfig, name: str) -> NormSpec:
    """A norm of hidden states, of the kind that the family has."""
    return _norm(config.switches.norm, name, (config.hidden_size,), config.rms_norm_eps, config.switches.norm_offset)


def output_spec(config: ModelConfig, matrix: WeightRef, norm: NormSpec | None) -> specs.OutputSpec:
    """What a half of a block ends with."""
    return specs.OutputSpec(matrix, norm, config.switches.residual_scale)


def attention_spec(config: ModelConfig, layer: str, index: int, post_norm: NormSpec | None) -> AttentionSpec:
    """Softmax attention of the layer of this name."""
    switches, rope = config.switches, config.ropes[index]
    rotary_dim = config.head_dim if rope.rotary_dim is None else rope.rotary_dim
    order = head_order(config.head_dim, rotary_dim, switches.is_interleaved)
    names = tuple(f"{layer}.{name}" for name in switches.names.qkv)
    output = WeightRef(
        (f"{layer}.{switches.names.output}",),
        (config.hidden_size,),
        config.num_heads * config.head_dim,
        switches.qkv_bias if switches.o_bias is None else switches.o_bias,
        is_transposed=switches.is_transposed,
    )
    sinks = TensorRef(f"{layer}.{switches.sinks}", (config.num_heads,), dtype=torch.float32)
    return AttentionSpec(
        qkv=_qkv(config, names, order),
        head_norms=_head_norms(config, switches.qk_norm, layer, order) if switches.qk_norm else None,
        output=output_spec(config, output, post_norm),
        num_heads=config.num_heads,
        cache=PagedKV(
            config.num_kv_heads,
            config.head_dim,
            config.sliding_windows[index],
            switches.attention_scale,
            switches.attention_soft_cap,
            slopes=switches.slopes,
            has_sinks=bool(switches.sinks),
            is_bidirectional=switches.is_bidirectional,
            has_bias=switches.bias is not None,
            num_mutual=config.num_mutual if index in switches.mutual else 0,
            num_input_tokens=config.num_input_tokens,
            num_input_samples=config.audio.max_samples if config.audio else 0,
        ),
        rotation=config.distinct_ropes.index(rope),
        clip=switches.clip,
        sinks=sinks if switches.sinks else None,
        turns=rotary_dim > 0,
        bias=_bias(config, index) if switches.bias else None,
    )


def _bias(config: ModelConfig, index: int) -> specs.BiasSpec:
    bias, names = config.switches.bias, config.switches.names
    assert bias is not None
    name = f"{names.layers}.{0 if bias.is_shared else index}.{names.bias}.weight"
    weight = TensorRef(name, (bias.num_buckets, config.num_heads), dtype=torch.float32)
    return specs.BiasSpec(weight, bias.max_distance, config.num_positions, config.switches.is_bidirectional)


def _qkv(config: ModelConfig, names: tuple[str, ...], order: tuple[int, ...]) -> WeightRef:
    switches, dim, num_kv_heads = config.switches, config.head_dim, config.num_kv_heads
    num_shared = config.num_heads // num_kv_heads
    num_rotated = config.num_heads + num_kv_heads
    rows = RowOrder(head=order, num_heads=num_rotated if order else 0)
    if len(names) == 1 and switches.fused is Fused.HEADS:
        rows = RowOrder(config.num_heads, (dim, dim, dim), head=order, num_heads=rows.num_heads)
    elif len(names) == 1 and switches.fused is Fused.GROUPS:
        rows = RowOrder(num_kv_heads, (num_shared * dim, dim, dim), head=order, num_heads=rows.num_heads)
    sizes = config.num_heads * dim, num_kv_heads * dim, num_kv_heads * dim
    return WeightRef(
        names,
        sizes,
        config.hidden_size,
        switches.qkv_bias,
        rows if rows != RowOrder() else None,
        switches.is_transposed,
        biasless=() if switches.key_bias else names[1:2],
    )


def _head_norms(config: ModelConfig, qk_norm: QKNorm, layer: str, order: tuple[int, ...]) -> specs.HeadNormsSpec:
    def norm(name: str, num_heads: int) -> NormSpec:
        shape: tuple[int, ...] = (config.head_dim,)
        if qk_norm.over_all or qk_norm.per_head:
            shape = (num_heads * config.head_dim,) if qk_norm.over_all else (num_heads, config.head_dim)
        rows = RowOrder(head=order, num_heads=prod(shape) // config.head_dim) if order else None
        return _norm(qk_norm.norm, f"{layer}.{name}", shape, config.rms_norm_eps, qk_norm.offset, rows)

    names = config.switches.names
    queries, keys = norm(names.query_norm, config.num_heads), norm(names.key_norm, config.num_kv_heads)
    return specs.HeadNormsSpec(queries, keys, qk_norm.over_all, qk_norm.is_last)


def _norm(
    kind: Norm, name: str, shape: tuple[int, ...], eps: float, offset: float = 0.0, order: RowOrder | None = None
) -> NormSpec:
    weight = TensorRef(f"{name}.weight", shape, offset, order=order)
    bias = TensorRef(f"{name}.bias", shape, order=order)
    return NormSpec(
        weight if kind not in (Norm.PLAIN_RMS, Norm.PLAIN_LAYER_NORM) else None,
        eps,
        bias if kind is Norm.LAYER_NORM else None,
        kind not in (Norm.RMS, Norm.PLAIN_RMS),
    )


def dense_spec(config: ModelConfig, layer: str, post_norm: NormSpec | None) -> DenseSpec:
    """The dense feed-forward layer of the layer of this name."""
    inner, hidden, switches = config.intermediate_size, config.hidden_size, config.switches
    has_bias, is_transposed = switches.mlp_bias, switches.is_transposed
    names = tuple(f"{layer}.{name}" for name in switches.names.gate_up)
    sizes = (inner, inner) if switches.is_gated else (inner,)
    order = None
    if switches.gate_is_last:
        order = RowOrder(head=(*range(inner, 2 * inner), *range(inner)), num_heads=1)
    first = WeightRef(names, sizes, hidden, has_bias, order, is_transposed)
    down = WeightRef((f"{layer}.{switches.names.down}",), (hidden,), inner, has_bias, is_transposed=is_transposed)
    return DenseSpec(first, config.activation, output_spec(config, down, post_norm))


@feed_forward_spec.register
def sized_spec(switches: SizedFeedForward, config: ModelConfig, layer: str, output_norm: NormSpec | None) -> DenseSpec:
    """The dense layer of this size."""
    return dense_spec(replace(config, intermediate_size=switches.intermediate_size), layer, output_norm)


@feed_forward_spec.register
def scaled_spec(switches: ScaledDense, config: ModelConfig, layer: str, output_norm: NormSpec | None) -> DenseSpec:
    """The dense layer with factors in its matrices."""
    sized = replace(config, intermediate_size=switches.size or config.intermediate_size)
    dense = dense_spec(sized, layer, output_norm)
    matrix = replace(dense.output.matrix, scales=(switches.output_scale,))
    first = replace(dense.first, scales=(switches.gate_scale, 1.0))
    return replace(dense, first=first, output=replace(dense.output, matrix=matrix))
