"""Feed-forward layers, alone or in mixtures of experts, of which a router chooses a few for each token.

Gate and up projection are one matrix, gate first. How a router chooses is data (`weft.engine.families.experts`), of
which each kind has a function here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, singledispatch
from math import inf
from typing import Protocol

import torch
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.families.experts import Function, Gating, Routing, SparseMixer, TopK
from weft.engine.layers.block import FeedForward, Layer, Linear

# On the CPU torch's own sigmoid and softplus round otherwise in vectors than in what is left over. There a result would
# depend on where its value lies, and so on the other rows of a step. `exp` and `log1p` have no such fault.


def sigmoid(values: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-values))."""
    return values.sigmoid() if values.is_cuda else values.neg().exp_().add_(1).reciprocal_()


def softplus(values: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(values)), which is values above 20."""
    return F.softplus(values) if values.is_cuda else torch.where(values > 20, values, values.exp().log1p_())


def _squared_relu(values: torch.Tensor) -> torch.Tensor:
    """So et al., 2021."""
    return F.relu(values).square_()


def _quick_gelu(values: torch.Tensor) -> torch.Tensor:
    return values * torch.sigmoid(1.702 * values)


# By their names in config.json, the first one that is equal.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _squared_relu,
}


# Further names of the same functions, up to rounding.
ALIASES: Mapping[str, str] = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
}


class Activated(Protocol):
    """A matrix and what follows it. Called, it does both at once; one after the other leaves room between them."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> (num_tokens, intermediate_size)."""

    def sums(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the matrix makes, gate first, in the dtype of the inputs or float32; the caller may change it."""

    def activate(self, sums: torch.Tensor) -> torch.Tensor:
        """The rest."""


@dataclass(frozen=True, slots=True)
class ActivatedLinear(Activated):
    """One layer after the other, unless something fused does the same."""

    linear: Layer
    activation: Layer
    fused: Layer | None = None

    @override
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.fused(inputs) if self.fused else self.activation(self.linear(inputs))

    @override
    def sums(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs)

    @override
    def activate(self, sums: torch.Tensor) -> torch.Tensor:
        return self.activation(sums)


def gated(gate_up: Layer, activation: str) -> ActivatedLinear:
    """activation(gate(x)) * up(x).

    Args:
        gate_up: (num_tokens, hidden_size) -> (num_tokens, 2 * intermediate_size), gate first.
        activation: A key of ACTIVATIONS.
    """
    activate = ACTIVATIONS[activation]

    def join(sums: torch.Tensor) -> torch.Tensor:
        gate, up = sums.chunk(2, dim=-1)  # (num_tokens, intermediate_size) each
        return activate(gate).mul_(up)

    return ActivatedLinear(gate_up, join)


def ungated(up: Layer, activation: str, fused: Layer | None = None) -> ActivatedLinear:
    """activation(up(x)), (num_tokens, hidden_size) -> (num_tokens, intermediate_size)."""
    return ActivatedLinear(up, ACTIVATIONS[activation], fused)


class Experts(Protocol):
    """The experts of a layer, made by `LayerKernels`. No expert computes other tokens than its own."""

    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> None:
        """Add the outputs of each token's experts, each times its share, in place.

        Args:
            residual: (num_tokens, hidden_size).
            inputs: (num_tokens, hidden_size).
            ids: (num_tokens, num_chosen), int64.
            shares: (num_tokens, num_chosen), float32.
        """

    def start(
        self, residual: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor
    ) -> Callable[[], None]:
        """As `add_to`, but a call of what is returned ends it; what is launched before that call need not wait."""
        self.add_to(residual, inputs, ids, shares)
        return _ended


def _ended() -> None:
    """Nothing is left to be done."""


def join(gating: Gating, values: torch.Tensor) -> torch.Tensor:
    """Values between the matrices, (num_rows, num_parts * inner size), gate first -> (num_rows, inner size)."""
    activate = ACTIVATIONS[gating.activation]
    if not gating.has_gate:
        return activate(values)
    gate, up = values.chunk(2, dim=-1)
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    gate = activate(gate) if gating.slope == 1.0 else gate * torch.sigmoid(gating.slope * gate)
    return gate * (up + gating.up_offset if gating.up_offset else up)


@singledispatch
def choose(routing: Routing, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose num_chosen experts for each token, in float32 and on the device; no choice depends on another token.

    Args:
        logits: (num_tokens, num_experts), float32.
        bias: (num_experts,), added to scores where experts are compared, and only there; None for nothing.

    Returns:
        Ids, int64, and shares, float32, both (num_tokens, num_chosen).
    """
    raise TypeError(f"experts are not chosen by {type(routing).__name__}")


@choose.register
def _choose_best(routing: TopK, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if _is_of_chosen(routing) and bias is None:
        chosen = logits.topk(routing.num_chosen)
        return chosen.indices, chosen.values.softmax(-1)
    scores = _apply(routing.scores, logits)
    ranks = scores if bias is None else scores + bias
    if routing.num_best_groups < routing.num_groups:
        ranks = _within_groups(routing, ranks)
    ids = ranks.topk(routing.num_chosen).indices
    shares = _apply(routing.shares, scores.gather(1, ids))
    if routing.divides:
        shares = shares / (shares.sum(1, keepdim=True) + routing.epsilon)
    return ids, shares * routing.scale if routing.scale != 1.0 else shares


def _is_of_chosen(routing: TopK) -> bool:
    """Whether shares are the softmax of the chosen logits alone, in which what others add cancels out."""
    by_others = routing.scores == "softmax" and routing.shares is None and routing.divides
    is_whole = routing.num_best_groups == routing.num_groups and routing.scale == 1.0
    return is_whole and (by_others or (routing.scores is None and routing.shares == "softmax" and not routing.divides))


def _within_groups(routing: TopK, ranks: torch.Tensor) -> torch.Tensor:
    """Ranks with those outside of the best groups at minus infinity."""
    groups = ranks.view(ranks.size(0), routing.num_groups, -1)
    best = groups.topk(routing.num_in_rank).values.sum(-1).topk(routing.num_best_groups).indices
    penalties = ranks.new_full(groups.shape[:2], -inf).scatter(1, best, 0.0)
    return (groups + penalties.unsqueeze(-1)).flatten(1)


@choose.register
def _choose_in_turn(
    routing: SparseMixer, logits: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """There is no bias."""
    ids = logits.topk(routing.num_chosen).indices
    left, shares = logits, logits.new_empty(ids.shape)
    for index in range(routing.num_chosen):
        chosen = ids[:, index : index + 1]
        best = left.gather(1, chosen)
        is_far = (best - logits) / logits.abs().maximum(best) > routing.tolerance
        shares[:, index] = left.masked_fill(is_far, -inf).softmax(-1).gather(1, chosen).squeeze(1)
        left = left.scatter(1, chosen, -inf)
    return ids, shares


def _apply(function: Function | None, values: torch.Tensor) -> torch.Tensor:
    match function:
        case "softmax":
            return values.softmax(-1)
        case "sigmoid":
            return sigmoid(values)
    return values


@dataclass(frozen=True, slots=True)
class ScaledInputs(Experts):
    """Experts whose shares count before them: each reads the inputs times its share, and its outputs count in full."""

    experts: Experts

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> None:
        for index in range(ids.size(1)):
            chosen, share = ids[:, index : index + 1], shares[:, index : index + 1]
            self.experts.add_to(residual, inputs * share.to(inputs.dtype), chosen, torch.ones_like(share))


@dataclass(frozen=True, slots=True)
class ExpertLayer(FeedForward):
    """A router, its experts, and a feed-forward layer for all tokens beside them, if any.

    Attributes:
        router: (num_experts, hidden_size).
        bias: See `choose`.
        shared: For all tokens; None if there is none.
        epilogue: What the sum of all outputs goes through before it is added; None for nothing.
    """

    router: Linear
    routing: Routing
    experts: Experts
    bias: torch.Tensor | None = None
    shared: FeedForward | None = None
    epilogue: Layer | None = None

    @override
    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        if self.epilogue is None:
            self._add_outputs(residual, normed)
            return
        outputs = torch.zeros_like(residual)
        self._add_outputs(outputs, normed)
        residual += self.epilogue(outputs)

    def _add_outputs(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        ids, shares = choose(self.routing, self.router.to_float32(normed), self.bias)
        finish = self.experts.start(residual, normed, ids, shares)
        if self.shared is not None:
            self.shared.add_to(residual, normed)
        finish()


@dataclass(frozen=True, slots=True)
class SharedExpert(FeedForward):
    """A feed-forward layer whose outputs count by the sigmoid of a gate, (1, hidden_size)."""

    gate: Linear
    forward: FeedForward

    @override
    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        outputs = torch.zeros_like(residual)
        self.forward.add_to(outputs, normed)
        residual.addcmul_(outputs, torch.sigmoid(self.gate(normed)))
