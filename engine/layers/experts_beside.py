"""A dense layer and experts beside it, which read the hidden states through norms of their own (Gemma 4)."""

from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine.layers.block import FeedForward
from weft.engine.layers.experts import Experts
from weft.engine.layers.parts import Layer, Linear
from weft.engine.layers.routing import Routing


@dataclass(frozen=True, slots=True)
class ExpertsBeside(FeedForward):
    """The sum of both, normalised, is added.

    Attributes:
        dense: With a norm of its outputs.
        router_norm, experts_norm: Of the hidden states.
        expert_scales: (num_experts,), factors on shares.
        outputs_norm: Of what the experts make together.
        norm: Of the sum.
    """

    dense: FeedForward
    router_norm: Layer
    router: Linear
    routing: Routing
    expert_scales: torch.Tensor
    experts_norm: Layer
    experts: Experts
    outputs_norm: Layer
    norm: Layer

    @override
    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        outputs, chosen = torch.zeros_like(residual), torch.zeros_like(residual)
        self.dense.add_to(outputs, normed)
        ids, shares = self.routing.choose(self.router.to_float32(self.router_norm(residual)), None)
        self.experts.add_to(chosen, self.experts_norm(residual), ids, shares * self.expert_scales[ids])
        residual += self.norm(outputs.add_(self.outputs_norm(chosen)))
