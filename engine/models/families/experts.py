"""Layers of experts as switches of a family; the names are those of most checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.engine.layers.routing import Gating, Routing, TopK
from weft.engine.models.families.family import FeedForwardSwitches
from weft.engine.models.families.fields import Fields

if TYPE_CHECKING:
    from weft.engine.models.config import ModelConfig
    from weft.engine.models.specs import FeedForwardSpec, NormSpec
    from weft.engine.weights.refs import RowOrder, WeightRef


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names behind that of a layer, without `.weight` and `.bias` if modules have them.

    Attributes:
        gate_up, down: `{}` stands for the number of an expert; without it a tensor holds all experts.
        suffixes: What follows the names of experts in the names of weights and biases.
        correction: Full name of the bias that only the choice of experts sees, "" for none.
        shared_gate: Name of the gate of the shared expert, "" if it counts in full.
    """

    router: str = "mlp.gate"
    gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    down: str = "mlp.experts.{}.down_proj"
    suffixes: tuple[str, str] = (".weight", ".bias")
    correction: str = ""
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = ""


CORRECTED = ExpertNames(correction="mlp.gate.e_score_correction_bias")
MIXTRAL = ExpertNames(
    router="block_sparse_moe.gate",
    gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)


@dataclass(frozen=True, slots=True)
class ExpertSwitches(FeedForwardSwitches):
    """The experts of a layer.

    Attributes:
        size: Values between the matrices of an expert.
        gating: None for that of the model's dense layers.
        shared_size: Values between the matrices of the expert for all tokens; 0 for none.
        router_bias, expert_bias, shared_bias: Whether these have biases.
        is_transposed: Whether the checkpoint has the matrices of experts as (inputs, outputs).
        is_interleaved: Whether the checkpoint has the outputs of gate and up in turn.
        has_correction_row: Whether the checkpoint has the correction bias as (1, num_experts).
    """

    num_experts: int
    size: int
    routing: Routing
    names: ExpertNames = ExpertNames()
    gating: Gating | None = None
    shared_size: int = 0
    router_bias: bool = False
    expert_bias: bool = False
    shared_bias: bool = False
    is_transposed: bool = False
    is_interleaved: bool = False
    has_correction_row: bool = False

    def spec(self, config: "ModelConfig", layer: str, output_norm: "NormSpec | None") -> "FeedForwardSpec":
        """See `FeedForwardSwitches`."""
        import torch

        from weft.engine.models.experts import ExpertsSpec
        from weft.engine.weights.refs import ExpertsRef, RowOrder, TensorRef

        hidden, names, count = config.hidden_size, self.names, self.num_experts
        gating = self.gating or Gating(config.activation, has_gate=config.switches.is_gated)
        order = RowOrder(self.size, (1, 1)) if self.is_interleaved else None
        gate_up = self._matrix(layer, names.gate_up, (self.size,) * gating.num_parts, hidden, order)
        down = self._matrix(layer, (names.down,), (hidden,), self.size)
        shape = (1, count) if self.has_correction_row else (count,)
        correction = TensorRef(f"{layer}.{names.correction}", shape, dtype=torch.float32)
        return ExpertsSpec(
            router=TensorRef(f"{layer}.{names.router}.weight", (count, hidden)),
            router_bias=TensorRef(f"{layer}.{names.router}.bias", (count,)) if self.router_bias else None,
            correction=correction if names.correction else None,
            routing=self.routing,
            gate_up=ExpertsRef(gate_up, count, names.suffixes, _fused(layer, names.gate_up, "gate_up_proj")),
            down=ExpertsRef(down, count, names.suffixes, _fused(layer, (names.down,), "down_proj")),
            gating=gating,
            shared=self._shared(config, layer) if self.shared_size else None,
            shared_gate=TensorRef(f"{layer}.{names.shared_gate}.weight", (1, hidden)) if names.shared_gate else None,
            norm=output_norm,
            scale=config.switches.residual_scale,
        )

    def num_values(self, hidden_size: int) -> int:
        """See `FeedForwardSwitches`: inputs and outputs of a token's experts, and what lies between."""
        return self.routing.num_chosen * (hidden_size + self.size) + self.shared_size

    def _matrix(
        self,
        layer: str,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        in_features: int,
        order: "RowOrder | None" = None,
    ) -> "WeightRef":
        from weft.engine.weights.refs import WeightRef

        full = tuple(f"{layer}.{name}" for name in names)
        return WeightRef(full, sizes, in_features, self.expert_bias, order=order, is_transposed=self.is_transposed)

    def _shared(self, config: "ModelConfig", layer: str) -> "FeedForwardSpec":
        from weft.engine.models.specs import GatedSpec, OutputSpec, UngatedSpec
        from weft.engine.weights.refs import WeightRef

        hidden, size, bias = config.hidden_size, self.shared_size, self.shared_bias
        names = tuple(f"{layer}.{name}" for name in self.names.shared_gate_up)
        output = OutputSpec(WeightRef((f"{layer}.{self.names.shared_down}",), (hidden,), size, bias))
        if not config.switches.is_gated:
            return UngatedSpec(WeightRef(names, (size,), hidden, bias), config.activation, output)
        return GatedSpec(WeightRef(names, (size, size), hidden, bias), config.activation, output)


def _fused(layer: str, names: tuple[str, ...], fused: str) -> str:
    """The tensor that holds all experts of a layer where they are not apart."""
    return f"{layer}.{names[0].partition('{}')[0]}{fused}" if names[0].endswith("_proj") and "{}" in names[0] else ""


def on_layers(
    fields: Fields, switches: ExpertSwitches, has_experts: Callable[[int], bool] = lambda layer: True
) -> tuple[ExpertSwitches | None, ...]:
    """These experts in the layers that have some, and None for the dense ones."""
    return tuple(switches if has_experts(layer) else None for layer in range(fields.integer("num_hidden_layers")))


def corrected(
    fields: Fields,
    num_experts: int,
    num_groups: int = 1,
    num_best_groups: int = 1,
    *,
    divides: bool = True,
    scale: float = 1.0,
) -> ExpertSwitches:
    """Experts as in DeepSeek V3: sigmoid scores, a correction bias, groups, shared experts.

    The arguments are what the family takes for granted where config.json says nothing.
    """
    size = fields.integer("moe_intermediate_size")
    return ExpertSwitches(
        num_experts=fields.integer("n_routed_experts", num_experts),
        size=size,
        routing=TopK(
            fields.integer("num_experts_per_tok"),
            scores="sigmoid",
            divides=fields.flag("norm_topk_prob", divides),
            num_groups=fields.integer("n_group", num_groups),
            num_best_groups=fields.integer("topk_group", num_best_groups),
            num_in_rank=2,
            scale=fields.number("routed_scaling_factor", scale),
        ),
        names=CORRECTED,
        shared_size=fields.integer("n_shared_experts", 1) * size,
    )
