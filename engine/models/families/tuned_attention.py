"""Switches of attention to chunks of the context, and of attention whose scores grow with the query's position."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from weft.engine.models.families.family import MixerSwitches

if TYPE_CHECKING:
    from weft.engine.describe.specs import MixerSpec, NormSpec
    from weft.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class AttentionSwitches(MixerSwitches):
    """Softmax attention that differs from that of other layers.

    Attributes:
        index: Of the layer.
        span: See `PagedKV`.
        is_tuned: Whether queries are multiplied by the family's temperature.
        has_head_norms: Whether the family's norm of queries and keys counts here.
    """

    index: int
    span: int | None = None
    is_tuned: bool = False
    has_head_norms: bool = True

    @override
    def spec(self, config: "ModelConfig", layer: str, output_norm: "NormSpec | None") -> "MixerSpec":
        from weft.engine.models.tuned_attention import tuned_attention_spec

        return tuned_attention_spec(self, config, layer, output_norm)
