"""Llama 2, 3 and 4, other models with the same architecture name, and families with small differences.

The families beside Llama are EXAONE, Mistral, Phi-3, OLMo and some that differ in a few switches, such as SmolLM3.
"""

from dataclasses import dataclass, replace

from weft.engine.families import attention, switches
from weft.engine.families.attention import read_window, windows_where
from weft.engine.families.experts import ExpertNames, ExpertSwitches, TopK, on_layers
from weft.engine.families.switches import FamilySwitches, Norm, QKNorm, TensorNames, family
from weft.engine.fields import Fields

_EPS_5 = {"rms_norm_eps": 1e-5}
_SQUARED = {"rms_norm_eps": 1e-5, "hidden_act": "relu2"}


@family("LlamaForCausalLM")
def llama(fields: Fields) -> FamilySwitches:
    """Biases only where config.json asks for them."""
    if fields.optional_text("model_type") == "exaone":
        return exaone(fields)
    is_other = fields.optional_text("model_type") in ("internlm3", "iquestcoder")  # under the same architecture
    return FamilySwitches(
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        defaults=_EPS_5 if is_other else {},
    )


@family("ArceeForCausalLM")
def arcee(fields: Fields) -> FamilySwitches:
    """Feed-forward layers without a gate."""
    names = TensorNames(gate_up=("mlp.up_proj",))
    return replace(llama(fields), names=names, is_gated=False, defaults=_SQUARED)


_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


@family("CwmForCausalLM")
def cwm(fields: Fields) -> FamilySwitches:
    """Windows in three of four layers."""
    return FamilySwitches(
        mlp_bias=fields.flag("mlp_bias", False),
        sliding_windows=windows_where(fields, read_window(fields, 8192), lambda layer: layer % 4 > 0),
        head_dim=128,
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_parameters": _CWM_ROPE},
    )


@family("Ernie4_5ForCausalLM")
def ernie4_5(fields: Fields) -> FamilySwitches:
    """ERNIE 4.5, dense: neighbours are rotated."""
    has_bias = fields.flag("use_bias", False)
    return FamilySwitches(
        qkv_bias=has_bias,
        mlp_bias=has_bias,
        is_interleaved=True,
        head_dim=128,
        ties_embeddings=True,
        defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
    )


@family("HeliumForCausalLM")
def helium(fields: Fields) -> FamilySwitches:
    """Neighbours are rotated; the output of attention has no bias."""
    return replace(
        llama(fields),
        o_bias=False,
        is_interleaved=True,
        head_dim=128,
        defaults={"rms_norm_eps": 1e-8, "rope_theta": 1e5},
    )


@family("Jais2ForCausalLM")
def jais2(fields: Fields) -> FamilySwitches:
    """LayerNorm, and feed-forward layers without a gate."""
    return FamilySwitches(
        names=TensorNames(gate_up=("mlp.up_proj",)),
        norm=Norm.LAYER_NORM,
        qkv_bias=fields.flag("attention_bias", True),
        mlp_bias=fields.flag("mlp_bias", True),
        is_gated=False,
        defaults=_SQUARED,
    )


@family("SeedOssForCausalLM")
def seed_oss(fields: Fields) -> FamilySwitches:
    """Biases of queries, keys and values are on unless config.json says otherwise."""
    return FamilySwitches(
        qkv_bias=fields.flag("attention_bias", True),
        o_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        head_dim=128,
        defaults={"num_key_value_heads": 8},
    )


@family("SmolLM3ForCausalLM")
def smollm3(fields: Fields) -> FamilySwitches:
    """Some layers have no rotary embedding."""
    ropeless = read_ropeless(fields)
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    return replace(
        llama(fields),
        ropeless=ropeless,
        sliding_windows=windows_where(fields, window, lambda layer: layer in ropeless),
        ties_embeddings=True,
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6},
    )


def read_ropeless(fields: Fields) -> frozenset[int]:
    """Layers without a rotary embedding: no_rope_layers holds 1 for those that have it; by default every fourth."""
    num_layers = fields.integer("num_hidden_layers")
    interval = fields.size("no_rope_layer_interval", 4)
    has_rope = fields.integers("no_rope_layers") or tuple((layer + 1) % interval for layer in range(num_layers))
    if len(has_rope) != num_layers:
        raise fields.wrong("no_rope_layers", f"a list of {num_layers} numbers")
    return frozenset(layer for layer, layer_has_rope in enumerate(has_rope) if not layer_has_rope)


_EXAONE_NAMES = replace(
    switches.GPT2,
    qkv=tuple(f"attn.attention.{part}_proj" for part in "qkv"),
    output="attn.attention.out_proj",
    gate_up=("mlp.c_fc_0", "mlp.c_fc_1"),
)


@family("ExaoneForCausalLM")
def exaone(fields: Fields) -> FamilySwitches:
    """EXAONE 3 and 3.5. What transformers saves has Llama's architecture and these names."""
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_key_value_heads": 8}
    return FamilySwitches(names=_EXAONE_NAMES, qkv_bias=bias, mlp_bias=mlp_bias, defaults=defaults)


@family("Exaone4ForCausalLM")
def exaone4(fields: Fields) -> FamilySwitches:
    """Norms behind each half, QK-norm; layers with full attention know no positions if others have a window."""
    window = read_window(fields, 4096)
    windows = attention.windows_by_pattern(fields, window, 4) if window is not None else ()
    return FamilySwitches(
        norms=switches.Norms.AFTER,
        qk_norm=QKNorm(),
        sliding_windows=windows,
        ropeless=attention.windowless(windows),
        defaults={"rms_norm_eps": 1e-5},
    )


@family("MistralForCausalLM")
def mistral(fields: Fields) -> FamilySwitches:
    """All layers have one window; the default is that of the first release."""
    windows = (read_window(fields, 4096),) * fields.integer("num_hidden_layers")
    return FamilySwitches(sliding_windows=windows, defaults={"num_key_value_heads": 8})


@family("MinistralForCausalLM")
def ministral(fields: Fields) -> FamilySwitches:
    """Layers may differ in their windows."""
    windows = windows_where(fields, read_window(fields, 4096), lambda layer: True)
    return FamilySwitches(sliding_windows=windows, defaults={"num_key_value_heads": 8})


_MINISTRAL3_ROPE = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@family("Ministral3ForCausalLM")
def ministral3(fields: Fields) -> FamilySwitches:
    """Scores grow with the position of the query, behind the original context."""
    rope = fields.with_defaults({"rope_parameters": _MINISTRAL3_ROPE}).section("rope_parameters")
    num_layers = fields.integer("num_hidden_layers")
    return FamilySwitches(
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_parameters": _MINISTRAL3_ROPE},
        sliding_windows=(fields.optional_integer("sliding_window"),) * num_layers,
        temperature=switches.Temperature(
            rope.number("llama_4_scaling_beta"), rope.size("original_max_position_embeddings"), offset=0
        ),
        mixers=tuple(attention.AttentionSwitches(layer, is_tuned=True) for layer in range(num_layers)),
        head_dim=128,
    )


@family("Phi3ForCausalLM")
def phi3(fields: Fields) -> FamilySwitches:
    """Phi-3 and Phi-4: stacked matrices, LongRoPE for long contexts, one window for all layers, if any."""
    return FamilySwitches(
        names=TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        sliding_windows=(fields.optional_integer("sliding_window"),) * fields.integer("num_hidden_layers"),
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    )


@family("OlmoForCausalLM")
def olmo(fields: Fields) -> FamilySwitches:
    """Norms without weights; queries, keys and values may be clipped."""
    return FamilySwitches(
        norm=Norm.PLAIN_LAYER_NORM,
        qkv_bias=fields.flag("attention_bias", False),
        clip=fields.optional_number("clip_qkv"),
        defaults={"rms_norm_eps": 1e-5},
    )


@family("Olmo2ForCausalLM")
def olmo2(fields: Fields) -> FamilySwitches:
    """No norm before a half, but one behind it; QK-norm over all heads."""
    return replace(olmo(fields), norm=Norm.RMS, norms=switches.Norms.AFTER, qk_norm=QKNorm(over_all=True), clip=None)


@family("Olmo3ForCausalLM")
def olmo3(fields: Fields) -> FamilySwitches:
    """Three of four layers have a window, and only the others scale the rotary embedding."""
    theta = fields.number("rope_theta", 5e5)
    return replace(
        olmo2(fields),
        sliding_windows=attention.windows_by_pattern(fields, read_window(fields, 4096), 4),
        local_rope_theta=theta,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": theta},
    )


@dataclass(frozen=True, slots=True)
class PictureLayers(switches.DecoderSwitches):
    """Layers, by index, in which tokens attend to pictures and not to each other; without pictures they do nothing."""

    indices: tuple[int, ...]


@family("MllamaForCausalLM")
def mllama(fields: Fields) -> FamilySwitches:
    """Llama 3.2 Vision. The embedding has eight rows behind the vocabulary, the first of which stands for a picture."""
    layers = fields.integers("cross_attention_layers") or (3, 8, 13, 18, 23, 28, 33, 38)
    return FamilySwitches(
        extension=PictureLayers(layers),
        num_unwritten_ids=8,
        unused=tuple(f"model.layers.{layer}." for layer in layers),
        sizes={"vocab_size": fields.size("vocab_size") + 8, "tie_word_embeddings": False},
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
    )


_LLAMA4_NAMES = TensorNames(gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj")

_LLAMA4_EXPERTS = ExpertNames(
    router="feed_forward.router",
    gate_up=("feed_forward.experts.gate_up_proj",),
    down="feed_forward.experts.down_proj",
    suffixes=("", ""),
    shared_gate_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    shared_down="feed_forward.shared_expert.down_proj",
)

_CHUNKED, _FULL = "chunked_attention", "full_attention"


@family("Llama4ForCausalLM")
def llama4(fields: Fields) -> FamilySwitches:
    """Attention to chunks, temperatures in layers without rotary embedding, and experts of scaled inputs.

    By default layers with a rotary embedding see chunks; the size of dense layers is not that of experts.
    """
    ropeless, bias = read_ropeless(fields), fields.flag("attention_bias", False)
    layers = range(fields.integer("num_hidden_layers"))
    by_index = tuple(_FULL if layer in ropeless else _CHUNKED for layer in layers)
    kinds = attention.read_layer_types(fields, by_index, (_CHUNKED, _FULL))
    span = fields.size("attention_chunk_size", 8192)
    is_tuned = fields.raw("attn_temperature_tuning") not in (False, 0)  # 4 in the first files
    mixers = tuple(
        attention.AttentionSwitches(
            layer, span if kinds[layer] == _CHUNKED else None, is_tuned and layer in ropeless, layer not in ropeless
        )
        for layer in layers
    )
    return FamilySwitches(
        names=_LLAMA4_NAMES,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_key_value_heads": 8},
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QKNorm(Norm.PLAIN_RMS, is_last=True) if fields.flag("use_qk_norm", True) else None,
        is_interleaved=True,
        ropeless=ropeless,
        temperature=switches.Temperature(fields.number("attn_scale", 0.1), fields.size("floor_scale", 8192), offset=1),
        mixers=mixers,
        feed_forwards=_feed_forwards(fields),
        head_dim=128,
    )


def _feed_forwards(fields: Fields) -> tuple[ExpertSwitches | switches.SizedFeedForward, ...]:
    size = fields.integer("intermediate_size")
    experts = ExpertSwitches(
        num_experts=fields.integer("num_local_experts", 16),
        size=size,
        routing=TopK(fields.integer("num_experts_per_tok", 1), scores=None, shares="sigmoid"),
        names=_LLAMA4_EXPERTS,
        scales_inputs=True,
        shared_size=size,
        is_transposed=True,
    )
    step = fields.size("interleave_moe_layer_step", 1)
    sparse = fields.integers("moe_layers")
    has_experts = (
        (lambda layer: layer in sparse) if fields.has("moe_layers") else (lambda layer: not (layer + 1) % step)
    )
    dense = switches.SizedFeedForward(fields.size("intermediate_size_mlp", 16_384))
    return tuple(layer or dense for layer in on_layers(fields, experts, has_experts))
