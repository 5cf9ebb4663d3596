"""The parts and tensor names of the model that a configuration describes.

The names are those of Llama, which all supported families share.
"""

from weft.engine.cache.specs import PagedKV
from weft.engine.models.config import ModelConfig
from weft.engine.models.specs import AttentionSpec, DecoderSpec, GatedSpec, NormSpec, OutputSpec, PreNormSpec
from weft.engine.weights.refs import Split, VectorRef, WeightRef


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """The parts of the model."""
    hidden, vocabulary = config.hidden_size, (config.vocab_size,)
    head = None if config.tie_word_embeddings else WeightRef(("lm_head",), vocabulary, hidden, split=Split.COLUMN)
    return DecoderSpec(
        embedding=WeightRef(("model.embed_tokens",), vocabulary, hidden, split=Split.COLUMN),
        blocks=tuple(_block(config, index) for index in range(config.num_layers)),
        norm=_norm(config, "model.norm"),
        head=head,
    )


def _block(config: ModelConfig, index: int) -> PreNormSpec:
    layer = f"model.layers.{index}"
    first, second, third, fourth = (
        _norm(config, f"{layer}.{name}_layernorm")
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    )
    has_post_norms = config.switches.has_post_norms  # otherwise the second norm comes before the feed-forward layer
    return PreNormSpec(
        mixer_norm=first,
        mixer=_attention(config, f"{layer}.self_attn", index, second if has_post_norms else None),
        feed_forward_norm=third if has_post_norms else second,
        feed_forward=_feed_forward(config, f"{layer}.mlp", fourth if has_post_norms else None),
    )


def _attention(config: ModelConfig, prefix: str, index: int, post_norm: NormSpec | None) -> AttentionSpec:
    switches = config.switches
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    names, sizes = tuple(f"{prefix}.{part}_proj" for part in "qkv"), (query_size, kv_size, kv_size)
    output = WeightRef((f"{prefix}.o_proj",), (config.hidden_size,), query_size, switches.o_bias, Split.ROW)
    # `norm_offset` is for norms over hidden states, not for those over heads.
    queries, keys = (
        NormSpec(VectorRef(f"{prefix}.{part}_norm", config.head_dim), config.rms_norm_eps) for part in "qk"
    )
    return AttentionSpec(
        qkv=WeightRef(names, sizes, config.hidden_size, switches.qkv_bias, Split.COLUMN),
        head_norms=(queries, keys) if switches.qk_norm else None,
        output=OutputSpec(output, post_norm),
        num_heads=config.num_heads,
        cache=PagedKV(
            config.num_kv_heads,
            config.head_dim,
            config.sliding_windows[index],
            switches.attention_scale,
            switches.attention_soft_cap,
        ),
    )


def _feed_forward(config: ModelConfig, prefix: str, post_norm: NormSpec | None) -> GatedSpec:
    inner, hidden, has_bias = config.intermediate_size, config.hidden_size, config.switches.mlp_bias
    names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
    return GatedSpec(
        gate_up=WeightRef(names, (inner, inner), hidden, has_bias, Split.COLUMN),
        activation=config.activation,
        output=OutputSpec(WeightRef((f"{prefix}.down_proj",), (hidden,), inner, has_bias, Split.ROW), post_norm),
    )


def _norm(config: ModelConfig, name: str) -> NormSpec:
    return NormSpec(VectorRef(name, config.hidden_size, config.switches.norm_offset), config.rms_norm_eps)
