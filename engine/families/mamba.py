"""Families whose layers keep a state of fixed size in place of keys and values: all in Mamba, some in LFM2.

Mamba, Falcon Mamba and Mamba 2 are state spaces, without feed-forward layers. LFM2 has short convolutions between
layers of attention, and LFM2-MoE has experts too.
"""

from dataclasses import dataclass, replace
from math import ceil, inf

from weft.engine.families import switches
from weft.engine.families.attention import ShortConvolutionSwitches, read_layer_types
from weft.engine.families.experts import ExpertNames, ExpertSwitches, TopK, on_layers
from weft.engine.families.switches import FamilySwitches, MixerSwitches, family
from weft.engine.fields import Fields

_MAMBA_NAMES = switches.TensorNames(
    embedding="backbone.embeddings", layers="backbone.layers", norm="backbone.norm_f", mixer_norm="norm"
)


@dataclass(frozen=True, slots=True)
class MambaSwitches(MixerSwitches):
    """A mixer of Mamba.

    Attributes:
        name: Of the mixer, behind that of its layer.
        width: Channels.
        rank: Values that the time steps of a token are made of.
        norm_eps: Of the norms of what is selected; None for no norms.
    """

    name: str
    width: int
    rank: int
    state_size: int
    kernel: int
    has_bias: bool
    has_convolution_bias: bool
    norm_eps: float | None = None
    has_norm_weights: bool = False


@dataclass(frozen=True, slots=True)
class Mamba2Switches(MixerSwitches):
    """A mixer of Mamba 2.

    Attributes:
        name: Of the mixer, behind that of its layer.
        has_norm: Whether there is a norm of the gated outputs.
        time_limits: See `StateSpace`.
        scales: Factors of gate, x, b, c and time steps.
        output_scale: Factor on the outcome.
    """

    name: str
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel: int
    has_bias: bool
    has_output_bias: bool
    has_convolution_bias: bool
    has_norm: bool = True
    time_limits: tuple[float, float] = (0.0, inf)
    scales: tuple[float, ...] = (1.0,) * 5
    output_scale: float = 1.0

    @property
    def width(self) -> int:
        """Values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return self.width + 2 * self.num_groups * self.state_size


@family("MambaForCausalLM")
def mamba(fields: Fields) -> FamilySwitches:
    """By default the output head shares the matrix of the embedding."""
    return _only_mixers(fields, read_mamba(fields), 50280, ties_embeddings=True)


@family("FalconMambaForCausalLM")
def falcon_mamba(fields: Fields) -> FamilySwitches:
    """Mamba with norms without weights."""
    return _only_mixers(fields, read_mamba(fields, fields.number("mixer_rms_eps", 1e-6)), 50280, ties_embeddings=True)


@family("Mamba2ForCausalLM")
def mamba2(fields: Fields) -> FamilySwitches:
    """Published configurations name all sizes."""
    require_silu(fields)
    has_bias = fields.flag("use_bias", False)
    mixer = Mamba2Switches(
        "mixer",
        num_heads=fields.integer("num_heads", 128),
        head_dim=fields.integer("head_dim", 64),
        state_size=fields.integer("state_size", 128),
        num_groups=fields.integer("n_groups", 8),
        kernel=fields.integer("conv_kernel", 4),
        has_bias=has_bias,
        has_output_bias=has_bias,
        has_convolution_bias=fields.flag("use_conv_bias", True),
        time_limits=read_limits(fields),
    )
    return _only_mixers(fields, mixer, 32768, ties_embeddings=False)


def read_mamba(fields: Fields, norm_eps: float | None = None) -> MambaSwitches:
    """The mixer that config.json describes."""
    require_silu(fields)
    hidden_size = fields.integer("hidden_size", 768)
    return MambaSwitches(
        "mixer",
        width=fields.integer("intermediate_size", int(fields.number("expand", 2) * hidden_size)),
        rank=fields.integer_or_auto("time_step_rank", ceil(hidden_size / 16)),
        state_size=fields.integer("state_size", 16),
        kernel=fields.integer("conv_kernel", 4),
        has_bias=fields.flag("use_bias", False),
        has_convolution_bias=fields.flag("use_conv_bias", True),
        norm_eps=norm_eps,
    )


def read_limits(fields: Fields) -> tuple[float, float]:
    """The least and the largest time step."""
    limits = fields.numbers("time_step_limit") or (0.0, inf)
    if len(limits) != 2:
        raise fields.wrong("time_step_limit", "two numbers")
    return limits[0], limits[1]


def require_silu(fields: Fields, name: str = "hidden_act") -> None:
    """Raise UseModule for another activation, which the mixers do not have."""
    activation = fields.optional_text(name) or "silu"
    if activation not in ("silu", "swish"):
        raise switches.UseModule(f"{name} {activation} is not supported in a state space model (silu)")


def _only_mixers(fields: Fields, mixer: MixerSwitches, vocab_size: int, *, ties_embeddings: bool) -> FamilySwitches:
    num_layers = fields.integer("num_hidden_layers", 64 if isinstance(mixer, Mamba2Switches) else 32)
    return FamilySwitches(
        names=_MAMBA_NAMES,
        defaults={
            "vocab_size": vocab_size,
            "hidden_size": 4096 if isinstance(mixer, Mamba2Switches) else 768,
            "num_hidden_layers": num_layers,
            "rms_norm_eps": 1e-5,
            # There is no attention, no feed-forward layer, and no bound on the context.
            "num_attention_heads": 1,
            "head_dim": mixer.head_dim if isinstance(mixer, Mamba2Switches) else 32,
            "intermediate_size": 2,
            "max_position_embeddings": 1 << 20,
        },
        has_rope=False,
        mixers=(mixer,) * num_layers,
        halves=(switches.Halves.MIXER,) * num_layers,
        ties_embeddings=ties_embeddings,
    )


_CONVOLUTION, _FULL = "conv", "full_attention"
_LFM2_NAMES = switches.TensorNames(
    norm="model.embedding_norm",
    mixer_norm="operator_norm",
    feed_forward_norm="ffn_norm",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    output="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)

_LFM2_EXPERTS = ExpertNames(
    router="feed_forward.gate",
    gate_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    down="feed_forward.experts.{}.w2",
)


@family("Lfm2ForCausalLM")
def lfm2(fields: Fields) -> FamilySwitches:
    """One dense layer for all tokens, of a size that has to be computed."""
    feed_forward = switches.SizedFeedForward(_intermediate_size(fields))
    return replace(_hybrid(fields), feed_forwards=(feed_forward,) * fields.integer("num_hidden_layers"))


@family("Lfm2MoeForCausalLM")
def lfm2_moe(fields: Fields) -> FamilySwitches:
    """Experts with sigmoid scores behind the first, dense layers."""
    routing = TopK(
        fields.integer("num_experts_per_tok", 4),
        scores="sigmoid",
        divides=fields.flag("norm_topk_prob", True),
        epsilon=1e-6,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    correction = "feed_forward.expert_bias" if fields.flag("use_expert_bias", True) else ""
    names = replace(_LFM2_EXPERTS, correction=correction)
    size, num_experts = fields.integer("moe_intermediate_size", 1792), fields.integer("num_experts", 32)
    experts, num_dense = ExpertSwitches(num_experts, size, routing, names), fields.integer("num_dense_layers", 2)
    return replace(_hybrid(fields), feed_forwards=on_layers(fields, experts, lambda layer: layer >= num_dense))


def _hybrid(fields: Fields) -> FamilySwitches:
    """Short convolutions, and attention in some layers; by default all layers have attention."""
    num_layers = fields.integer("num_hidden_layers")
    attending = fields.integers("full_attn_idxs") if fields.has("full_attn_idxs") else range(num_layers)
    default = tuple(_FULL if layer in attending else _CONVOLUTION for layer in range(num_layers))
    layer_types = read_layer_types(fields, default, (_CONVOLUTION, _FULL))
    convolution = ShortConvolutionSwitches(fields.integer("conv_L_cache", 3), fields.flag("conv_bias", False))
    return FamilySwitches(
        names=_LFM2_NAMES,
        defaults={"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
        qk_norm=switches.QKNorm(),
        mixers=tuple(convolution if layer_type == _CONVOLUTION else None for layer_type in layer_types),
        ties_embeddings=fields.flag("tie_embedding", True),
    )


def _intermediate_size(fields: Fields) -> int:
    """Two thirds of what config.json says, times a factor, rounded up."""
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.integer("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple
