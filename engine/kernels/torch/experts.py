"""Experts by torch's own operations: the rows of one expert after those of another. Waits for the device."""

import torch
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.layers.experts import Experts, join
from weft.engine.layers.routing import Gating


class TorchExperts(Experts):
    """The reference for all others."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
        gating: Gating,
    ) -> None:
        """Take gate_up (num_experts, num_parts * size, hidden_size) and down (num_experts, hidden_size, size).

        Biases have the first two dimensions of their matrices; None without.
        """
        self.gate_up, self.gate_up_bias = gate_up, gate_up_bias
        self.down, self.down_bias = down, down_bias
        self.gating = gating

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> None:
        pairs = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=len(self.gate_up)).tolist()
        sums = torch.zeros_like(residual, dtype=torch.float32)
        for expert, chosen in enumerate(torch.split(pairs, counts)):
            if len(chosen):
                rows = chosen // ids.size(1)
                outputs = self._compute(expert, inputs[rows])
                sums.index_add_(0, rows, outputs * shares.flatten()[chosen].unsqueeze(1))
        residual += sums

    def _compute(self, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(expert, join(self.gating, self.first(expert, inputs)))

    def first(self, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        """What gate and up projection of an expert make, gate first."""
        bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
        return F.linear(inputs, self.gate_up[expert], bias)

    def second(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        """What its down projection makes."""
        return F.linear(inner, self.down[expert], None if self.down_bias is None else self.down_bias[expert])
