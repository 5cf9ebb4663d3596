"""Layers of experts as data: which experts compute a token, how much each counts, what one computes, what it is named.

The routing, the gating and the switches of a family are described here and computed elsewhere. Imports no torch, so
that families may name them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from weft.engine.families.switches import FeedForwardSwitches
from weft.engine.fields import Fields

Function = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Gating:
    """What an expert computes between its matrices: activation(gate) * (up + up_offset).

    Attributes:
        activation: A key of `weft.engine.layers.feed_forward.ACTIVATIONS`.
        has_gate: Without it, activation(up) alone.
        limit: Gate is at most that, and up between minus that and that; None for no limit.
        slope: SiLU becomes gate * sigmoid(slope * gate).
    """

    activation: str = "silu"
    has_gate: bool = True
    limit: float | None = None
    slope: float = 1.0
    up_offset: float = 0.0

    @property
    def num_parts(self) -> int:
        """Projections of the inputs: gate and up, or up alone."""
        return 2 if self.has_gate else 1

    @property
    def is_plain(self) -> bool:
        """Whether it is activation(gate) * up."""
        return self == Gating(self.activation)


class Routing(Protocol):
    """Which experts a token chooses (see `weft.engine.layers.feed_forward.choose`)."""

    @property
    def num_chosen(self) -> int:
        """Experts of a token."""


@dataclass(frozen=True, slots=True)
class TopK:
    """The experts with the best scores.

    Attributes:
        scores: What is made of logits before the choice, over all experts; None for nothing.
        shares: What is made of the scores of the chosen, before they are shares; None for nothing.
        divides: Whether shares are then divided by their sum, to which epsilon is added.
        num_groups: Neighbouring experts are groups of one size; those of the best num_best_groups may be chosen.
        num_in_rank: A group counts as much as this many of its best experts together.
        scale: Multiplier of shares.
    """

    num_chosen: int
    scores: Function | None = "softmax"
    shares: Function | None = None
    divides: bool = False
    epsilon: float = 1e-20
    num_groups: int = 1
    num_best_groups: int = 1
    num_in_rank: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SparseMixer:
    """The best expert, then the best of the rest, each with its softmax among those nearly as good (Liu et al., 2024).

    Attributes:
        tolerance: Relative distance up to which a logit is nearly as good.
    """

    num_chosen: int
    tolerance: float


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names behind that of a layer, without `.weight` and `.bias` if modules have them.

    The defaults are those of most checkpoints.

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
        scales_inputs: Whether shares multiply the inputs of experts, not the outputs.
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
    scales_inputs: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_bias: bool = False
    is_transposed: bool = False
    is_interleaved: bool = False
    has_correction_row: bool = False

    def num_values(self, hidden_size: int) -> int:
        """See `FeedForwardSwitches`: inputs and outputs of a token's experts, and what lies between."""
        return self.routing.num_chosen * (hidden_size + self.size) + self.shared_size


def on_layers(
    fields: Fields, switches: ExpertSwitches, has_experts: Callable[[int], bool] = lambda layer: True
) -> tuple[ExpertSwitches | None, ...]:
    """These experts in the layers that have some, and None for the dense ones."""
    return tuple(switches if has_experts(layer) else None for layer in range(fields.integer("num_hidden_layers")))


def corrected(fields: Fields, num_experts: int, *, divides: bool = True, scale: float = 1.0) -> ExpertSwitches:
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
            num_groups=fields.integer("n_group", 1),
            num_best_groups=fields.integer("topk_group", 1),
            num_in_rank=2,
            scale=fields.number("routed_scaling_factor", scale),
        ),
        names=CORRECTED,
        shared_size=fields.integer("n_shared_experts", 1) * size,
    )
