"""Mixtures of experts: feed-forward layers in which a router chooses a few of many small networks for each token."""

from dataclasses import dataclass
from typing import Protocol

import torch
from typing_extensions import override

from weft.engine.layers.block import FeedForward
from weft.engine.layers.gated import ACTIVATIONS
from weft.engine.layers.parts import Layer, Linear
from weft.engine.layers.routing import Gating, Routing


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


class Experts(Protocol):
    """The experts of a layer, made by a kit. No expert computes other tokens than its own."""

    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> None:
        """Add the outputs of each token's experts, each times its share, in place.

        Args:
            residual: (num_tokens, hidden_size).
            inputs: (num_tokens, hidden_size).
            ids: (num_tokens, num_chosen), int64.
            shares: (num_tokens, num_chosen), float32.
        """


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
        bias: See `Routing.choose`.
        shared: For all tokens; None if there is none.
        follower: What the sum of all outputs goes through before it is added; None for nothing.
    """

    router: Linear
    routing: Routing
    experts: Experts
    bias: torch.Tensor | None = None
    shared: FeedForward | None = None
    follower: Layer | None = None

    @override
    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        if self.follower is None:
            self._add_outputs(residual, normed)
            return
        outputs = torch.zeros_like(residual)
        self._add_outputs(outputs, normed)
        residual += self.follower(outputs)

    def _add_outputs(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        ids, shares = self.routing.choose(self.router.to_float32(normed), self.bias)
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
