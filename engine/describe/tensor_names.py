"""The parts and tensor names of the model that a configuration describes."""

from math import prod

import torch

from weft.engine.cache.specs import PagedKV
from weft.engine.describe.config import ModelConfig
from weft.engine.describe.specs import (
    AttentionSpec,
    BlockSpec,
    DecoderSpec,
    DenseSpec,
    FeedForwardSpec,
    HeadNormsSpec,
    MixerSpec,
    NormSpec,
    OutputSpec,
    ParallelSpec,
    PostNormSpec,
    PreNormSpec,
)
from weft.engine.families.switches import Fused, Halves, Norm, Norms, QKNorm
from weft.engine.layers.rotary import head_order
from weft.engine.weights.reader import RowOrder, TensorRef, WeightRef


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """The parts of the model."""
    hidden, vocabulary, switches = config.hidden_size, (config.vocab_size,), config.switches
    names, head = switches.names, None
    if not config.tie_word_embeddings:
        head = WeightRef((names.head,), vocabulary, hidden, switches.head_bias)
    positions = token_types = None
    if names.positions:
        num_positions = config.num_positions + switches.num_positions_skipped
        positions = WeightRef((names.positions,), (num_positions,), hidden)
    if names.token_types:
        token_types = WeightRef((names.token_types,), (config.num_token_types,), hidden)
    spec = DecoderSpec(
        embedding=WeightRef((names.embedding,), vocabulary, hidden),
        blocks=tuple(_block(config, index) for index in range(config.num_layers)),
        norm=norm_spec(config, names.norm) if switches.has_final_norm else None,
        head=head,
        positions=positions,
        embedding_norm=norm_spec(config, names.embedding_norm) if names.embedding_norm else None,
        token_types=token_types,
    )
    return switches.extension.extend(config, spec) if switches.extension else spec


def norm_spec(config: ModelConfig, name: str) -> NormSpec:
    """A norm of hidden states, of the kind that the family has."""
    return _norm(config.switches.norm, name, (config.hidden_size,), config.rms_norm_eps, config.switches.norm_offset)


def output_spec(config: ModelConfig, matrix: WeightRef, norm: NormSpec | None) -> OutputSpec:
    """What a half of a block ends with."""
    return OutputSpec(matrix, norm, config.switches.residual_scale)


def _block(config: ModelConfig, index: int) -> BlockSpec:
    switches, layer = config.switches, f"{config.switches.names.layers}.{index}"
    names, norms = switches.names, switches.norms
    before = norms not in (Norms.AFTER, Norms.OF_SUM)
    after = norms in (Norms.AFTER, Norms.AROUND)
    has_first = before and index not in switches.normless
    first = norm_spec(config, f"{layer}.{names.mixer_norm}") if has_first else None
    halves = switches.halves[index] if switches.halves else Halves.BOTH
    if halves is Halves.MIXER:
        return PreNormSpec(first, _mixer(config, layer, index, None), None, None)
    if halves is Halves.FEED_FORWARD:
        return PreNormSpec(None, None, first, _feed_forward(config, layer, index, None))
    second = norm_spec(config, f"{layer}.{names.feed_forward_norm}") if before and names.feed_forward_norm else None
    mixer = _mixer(config, layer, index, norm_spec(config, f"{layer}.{names.mixer_post_norm}") if after else None)
    post_norm = norm_spec(config, f"{layer}.{names.feed_forward_post_norm}") if after else None
    feed_forward = _feed_forward(config, layer, index, post_norm)
    if norms is Norms.OF_SUM:
        mixer_norm, last = (f"{layer}.{name}" for name in (names.mixer_post_norm, names.feed_forward_post_norm))
        return PostNormSpec(mixer, norm_spec(config, mixer_norm), feed_forward, norm_spec(config, last))
    if norms is Norms.PARALLEL:
        assert first is not None
        return ParallelSpec(first, mixer, second, feed_forward)
    return PreNormSpec(first, mixer, second, feed_forward)


def _mixer(config: ModelConfig, layer: str, index: int, post_norm: NormSpec | None) -> MixerSpec:
    chosen = config.switches.mixers[index] if config.switches.mixers else None
    return chosen.spec(config, layer, post_norm) if chosen else attention_spec(config, layer, index, post_norm)


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
        ),
        rotation=config.distinct_ropes.index(rope),
        clip=switches.clip,
        sinks=sinks if switches.sinks else None,
        turns=rotary_dim > 0,
    )


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
    )


def _head_norms(config: ModelConfig, qk_norm: QKNorm, layer: str, order: tuple[int, ...]) -> HeadNormsSpec:
    def norm(name: str, num_heads: int) -> NormSpec:
        shape: tuple[int, ...] = (config.head_dim,)
        if qk_norm.over_all or qk_norm.per_head:
            shape = (num_heads * config.head_dim,) if qk_norm.over_all else (num_heads, config.head_dim)
        rows = RowOrder(head=order, num_heads=prod(shape) // config.head_dim) if order else None
        return _norm(qk_norm.norm, f"{layer}.{name}", shape, config.rms_norm_eps, qk_norm.offset, rows)

    names = config.switches.names
    queries, keys = norm(names.query_norm, config.num_heads), norm(names.key_norm, config.num_kv_heads)
    return HeadNormsSpec(queries, keys, qk_norm.over_all, qk_norm.is_last)


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


def _feed_forward(config: ModelConfig, layer: str, index: int, post_norm: NormSpec | None) -> FeedForwardSpec:
    chosen = config.switches.feed_forwards[index] if config.switches.feed_forwards else None
    return chosen.spec(config, layer, post_norm) if chosen else dense_spec(config, layer, post_norm)


def dense_spec(config: ModelConfig, layer: str, post_norm: NormSpec | None) -> DenseSpec:
    """The dense feed-forward layer of the layer of this name."""
    inner, hidden, switches = config.intermediate_size, config.hidden_size, config.switches
    has_bias, is_transposed = switches.mlp_bias, switches.is_transposed
    names = tuple(f"{layer}.{name}" for name in switches.names.gate_up)
    sizes = (inner, inner) if switches.is_gated else (inner,)
    first = WeightRef(names, sizes, hidden, has_bias, is_transposed=is_transposed)
    down = WeightRef((f"{layer}.{switches.names.down}",), (hidden,), inner, has_bias, is_transposed=is_transposed)
    return DenseSpec(first, config.activation, output_spec(config, down, post_norm))
