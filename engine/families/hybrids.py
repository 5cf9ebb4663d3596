"""Families that mix attention and state spaces: Falcon-H1, Bamba, Granite 4, Jamba, Nemotron-H."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf

from weft.engine.families import mixtures as granite
from weft.engine.families import switches
from weft.engine.families.experts import ExpertNames, ExpertSwitches, TopK, corrected, on_layers
from weft.engine.families.mamba import Mamba2Switches, MambaSwitches, read_limits, require_silu
from weft.engine.families.switches import FamilySwitches, MixerSwitches, TensorNames, UseModule, family
from weft.engine.fields import Fields
from weft.engine.wire.errors import ModelError

_NAMES = TensorNames(
    norm="model.final_layernorm",
    feed_forward_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


@dataclass(frozen=True, slots=True)
class ScaledDense(switches.FeedForwardSwitches):
    """A dense layer with factors on gate and outcome; size counts in place of intermediate_size, None for that."""

    gate_scale: float = 1.0
    output_scale: float = 1.0
    size: int | None = None

    def num_values(self, hidden_size: int) -> int:
        """See `FeedForwardSwitches`."""
        return hidden_size + 2 * (self.size or 0)


@dataclass(frozen=True, slots=True)
class AttentionAndMamba2(MixerSwitches):
    """Attention and Mamba 2 side by side; output_scale is a factor on the outcome of attention."""

    mamba: Mamba2Switches
    output_scale: float


@family("FalconH1ForCausalLM")
def falcon_h1(fields: Fields) -> FamilySwitches:
    """Multipliers everywhere: of scores as a scale, of the inputs of state spaces as they are, others in weights."""
    if fields.flag("mamba_rms_norm", False) and fields.flag("mamba_norm_before_gate", True):
        raise UseModule("mamba_norm_before_gate is not supported (a norm behind the gate)")
    num_layers, attention_bias = fields.integer("num_hidden_layers", 32), fields.flag("attention_bias", False)
    inputs, scale = fields.number("attention_in_multiplier", 1.0), fields.number("key_multiplier", 1.0)
    ssm_inputs = fields.number("ssm_in_multiplier", 1.0)
    has_bias, has_output_bias = fields.flag("mamba_proj_bias", False), fields.flag("projectors_bias", False)
    if (attention_bias and inputs != 1.0) or (has_bias and ssm_inputs != 1.0):
        raise UseModule("attention_bias and mamba_proj_bias are not supported with multipliers of inputs")
    gate, down = fields.numbers("mlp_multipliers") or (1.0, 1.0)
    width = fields.optional_integer("mamba_d_ssm") if fields.mentions("mamba_d_ssm") else 1024
    mamba = replace(
        _mamba2(fields, width or fields.integer("mamba_expand", 2) * fields.integer("hidden_size")),
        has_output_bias=has_output_bias,
        has_norm=fields.flag("mamba_rms_norm", False),
        scales=tuple(ssm_inputs * part for part in fields.numbers("ssm_multipliers") or (1.0,) * 5),
        output_scale=fields.number("ssm_out_multiplier", 1.0),
    )
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads", 32))
    return FamilySwitches(
        names=_NAMES,
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 8192},
        qkv_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        attention_scale=head_dim**-0.5 * inputs**2 * scale,
        mixers=(AttentionAndMamba2(mamba, inputs * fields.number("attention_out_multiplier", 1.0)),) * num_layers,
        feed_forwards=(ScaledDense(gate, down),) * num_layers,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1.0),
    )


@family("BambaForCausalLM")
def bamba(fields: Fields) -> FamilySwitches:
    """Attention, with half of each head rotated, in the layers of attn_layer_indices."""
    attention_bias, with_attention = fields.flag("attention_bias", False), fields.integers("attn_layer_indices")
    return FamilySwitches(
        names=_NAMES,
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "partial_rotary_factor": 0.5,
        },
        qkv_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        mixers=_mixers(fields, _mamba2(fields), lambda layer: layer in with_attention),
    )


@family("GraniteMoeHybridForCausalLM")
def granite_hybrid(fields: Fields) -> FamilySwitches:
    """Layers by layer_types; multipliers of Granite; experts beside a dense layer, unless there are none."""
    has_bias, dense_size = fields.flag("attention_bias", False), fields.integer("shared_intermediate_size", 1024)
    num_layers, num_experts = fields.integer("num_hidden_layers", 32), fields.integer("num_local_experts", 8)
    kinds = fields.texts("layer_types") or ("mamba",) * num_layers
    experts = ExpertSwitches(
        num_experts=num_experts,
        size=fields.integer("intermediate_size", 11008),
        routing=TopK(fields.integer("num_experts_per_tok", 2), divides=True),
        names=granite.GRANITE_EXPERTS,
        shared_size=dense_size,
    )
    return FamilySwitches(
        names=TensorNames(gate_up=granite.GRANITE_EXPERTS.shared_gate_up, down=granite.GRANITE_EXPERTS.shared_down),
        defaults={"max_position_embeddings": 2048, "intermediate_size": 11008},
        qkv_bias=has_bias,
        has_rope=fields.optional_text("position_embedding_type") == "rope",
        mixers=_mixers(fields, _mamba2(fields), lambda layer: kinds[layer] in ("attention", "full_attention")),
        feed_forwards=(experts if num_experts else ScaledDense(size=dense_size),) * num_layers,
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


@family("JambaForCausalLM")
def jamba(fields: Fields) -> FamilySwitches:
    """Mamba with norms of what is selected; attention without positions, and experts, every so many layers."""
    require_silu(fields)
    hidden_size = fields.integer("hidden_size")
    period, offset = fields.integer("attn_layer_period", 8), fields.integer("attn_layer_offset", 4)
    expert_period, expert_offset = fields.integer("expert_layer_period", 2), fields.integer("expert_layer_offset", 1)
    mamba = MambaSwitches(
        "mamba",
        width=fields.integer("mamba_expand", 2) * hidden_size,
        rank=fields.integer_or_auto("mamba_dt_rank", ceil(hidden_size / 16)),
        state_size=fields.integer("mamba_d_state", 16),
        kernel=fields.integer("mamba_d_conv", 4),
        has_bias=fields.flag("mamba_proj_bias", False),
        has_convolution_bias=fields.flag("mamba_conv_bias", True),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        has_norm_weights=True,
    )
    experts = ExpertSwitches(
        num_experts=fields.integer("num_experts", 16),
        size=fields.integer("intermediate_size"),
        routing=TopK(fields.integer("num_experts_per_tok", 2), divides=False),
        names=ExpertNames(
            router="feed_forward.router",
            gate_up=("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
            down="feed_forward.experts.{}.down_proj",
        ),
    )
    return FamilySwitches(
        names=_NAMES,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 262144},
        has_rope=False,
        mixers=_mixers(fields, mamba, lambda layer: layer % period == offset),
        feed_forwards=on_layers(
            fields, experts, lambda layer: experts.num_experts > 1 and layer % expert_period == expert_offset
        ),
    )


_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe", "linear_attention": "mamba"}
_KINDS |= {"full_attention": "attention"}


@family("NemotronHForCausalLM")
def nemotron_h(fields: Fields) -> FamilySwitches:
    """Blocks of one part each, by hybrid_override_pattern or layers_block_type."""
    names = fields.optional_text("hybrid_override_pattern") or fields.texts("layers_block_type")
    kinds = tuple(_KINDS.get(name, name) for name in names)
    if fields.has("moe_latent_size") or fields.integer("num_nextn_predict_layers", 0):
        raise UseModule("moe_latent_size and num_nextn_predict_layers are not supported in Nemotron-H")
    if not kinds or set(kinds) - {"mamba", "attention", "mlp", "moe"}:
        raise fields.wrong("layers_block_type", "a list of mamba, attention, mlp and moe")
    require_silu(fields, "mamba_hidden_act")
    has_bias = fields.flag("use_bias", False)
    mamba = Mamba2Switches(
        "mixer",
        num_heads=fields.integer("mamba_num_heads", 128),
        head_dim=fields.integer("mamba_head_dim", 64),
        state_size=fields.integer("ssm_state_size", 128),
        num_groups=fields.integer("n_groups", 8),
        kernel=fields.integer("conv_kernel", 4),
        has_bias=has_bias,
        has_output_bias=has_bias,
        has_convolution_bias=fields.flag("use_conv_bias", True),
        time_limits=(fields.number("time_step_min", 0.001), inf),
    )
    experts = replace(
        corrected(fields.with_defaults({"num_experts_per_tok": 2, "moe_intermediate_size": 7688}), 8),
        num_experts=fields.integer("n_routed_experts", 8),
        names=ExpertNames(
            router="mixer.gate",
            gate_up=("mixer.experts.{}.up_proj",),
            down="mixer.experts.{}.down_proj",
            correction="mixer.gate.e_score_correction_bias",
            shared_gate_up=("mixer.shared_experts.up_proj",),
            shared_down="mixer.shared_experts.down_proj",
        ),
        shared_size=fields.integer("moe_shared_expert_intermediate_size", 7688),
        shared_bias=fields.flag("mlp_bias", False),
    )
    return FamilySwitches(
        names=TensorNames(
            embedding="backbone.embeddings",
            layers="backbone.layers",
            norm="backbone.norm_f",
            mixer_norm="norm",
            qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
            output="mixer.o_proj",
            gate_up=("mixer.up_proj",),
            down="mixer.down_proj",
        ),
        defaults={
            "num_hidden_layers": len(kinds),
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
        },
        has_rope=False,
        mlp_bias=fields.flag("mlp_bias", False),
        mixers=tuple(mamba if kind == "mamba" else None for kind in kinds),
        halves=tuple(
            switches.Halves.FEED_FORWARD if kind in ("mlp", "moe") else switches.Halves.MIXER for kind in kinds
        ),
        feed_forwards=tuple(experts if kind == "moe" else None for kind in kinds),
        head_dim=128,
        activation=fields.optional_text("mlp_hidden_act") or "relu2",
        is_gated=False,
    )


def _mamba2(fields: Fields, width: int | None = None) -> Mamba2Switches:
    """The mixer that config.json describes; width is mamba_expand * hidden_size if None."""
    require_silu(fields)
    width = width or fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    num_heads, has_bias = fields.integer("mamba_n_heads", 128), fields.flag("mamba_proj_bias", False)
    head_dim = fields.integer_or_auto("mamba_d_head", width // num_heads)
    if num_heads * head_dim != width:
        raise ModelError(f"{num_heads} heads (mamba_n_heads) of {head_dim} values (mamba_d_head) are not {width}")
    return Mamba2Switches(
        "mamba",
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=fields.integer("mamba_d_state", 256),
        num_groups=fields.integer("mamba_n_groups", 1),
        kernel=fields.integer("mamba_d_conv", 4),
        has_bias=has_bias,
        has_output_bias=has_bias,
        has_convolution_bias=fields.flag("mamba_conv_bias", True),
        time_limits=read_limits(fields),
    )


def _mixers(
    fields: Fields, mixer: MixerSwitches, has_attention: Callable[[int], bool]
) -> tuple[MixerSwitches | None, ...]:
    """The mixer in all layers without attention."""
    return tuple(None if has_attention(layer) else mixer for layer in range(fields.integer("num_hidden_layers", 32)))
