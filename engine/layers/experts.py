"""Mixtures of experts: a router chooses a few of many small feed-forward networks for each token.

How it chooses is data (`weft.engine.families.experts`), of which each kind has a function here.
"""

from dataclasses import dataclass
from functools import singledispatch
from math import inf

import torch
from typing_extensions import override

from weft.engine.families.experts import Function, Routing, SparseMixer, TopK
from weft.engine.layers.block import FeedForward, Layer, Linear
from weft.engine.layers.feed_forward import Experts, sigmoid


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
        self.experts.add_to(residual, normed, ids, shares)
        if self.shared is not None:
            self.shared.add_to(residual, normed)


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
