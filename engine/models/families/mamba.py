"""Mamba, Falcon Mamba and Mamba 2: state spaces in place of attention, and no feed-forward layers."""

from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING

from weft.engine.fields import Fields
from weft.engine.models.families.family import FamilySwitches, Halves, MixerSwitches, UseModule, family
from weft.engine.models.families.names import TensorNames

if TYPE_CHECKING:
    from weft.engine.describe.specs import MixerSpec, NormSpec
    from weft.engine.models.config import ModelConfig

_NAMES = TensorNames(
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

    def spec(self, config: "ModelConfig", layer: str, output_norm: "NormSpec | None") -> "MixerSpec":
        """See `MixerSwitches`."""
        from weft.engine.models.mamba import mamba_spec

        return mamba_spec(self, config, layer, output_norm)


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

    def spec(self, config: "ModelConfig", layer: str, output_norm: "NormSpec | None") -> "MixerSpec":
        """See `MixerSwitches`."""
        from weft.engine.models.mamba import mamba2_spec

        return mamba2_spec(self, config, layer, output_norm)


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
        raise UseModule(f"{name} {activation} is not supported in a state space model (silu)")


def _only_mixers(fields: Fields, mixer: MixerSwitches, vocab_size: int, *, ties_embeddings: bool) -> FamilySwitches:
    num_layers = fields.integer("num_hidden_layers", 64 if isinstance(mixer, Mamba2Switches) else 32)
    return FamilySwitches(
        names=_NAMES,
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
        halves=(Halves.MIXER,) * num_layers,
        ties_embeddings=ties_embeddings,
    )
