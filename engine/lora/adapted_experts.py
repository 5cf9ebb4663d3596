"""A layer of experts, each of which takes adapters.

Tokens without an adapter go through the experts as they are. The others go expert by expert, since what an adapter adds
comes before the activation. This is slow, and waits for the device.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from typing_extensions import override

from weft.engine.layers.experts import Experts, join
from weft.engine.layers.routing import Gating
from weft.engine.lora.step_rows import AdapterStep, Site, StepRows
from weft.engine.step.batch import Ints


class SeparableExperts(Experts, Protocol):
    """Experts whose matrices can be used one by one."""

    gating: Gating

    def first(self, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        """What gate and up projection make, gate first, in the dtype of the inputs or float32."""

    def second(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        """What the down projection makes."""


class AdaptedExperts(Experts):
    """Experts with the sites of their matrices, one for each expert."""

    def __init__(
        self, inner: SeparableExperts, first_sites: Sequence[Site], second_sites: Sequence[Site], step: AdapterStep
    ) -> None:
        """Take the experts without adapters."""
        self.inner, self._first_sites, self._second_sites, self._step = inner, first_sites, second_sites, step

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> None:
        rows = self._step.rows(inputs.size(0))
        if rows is None:
            self.inner.add_to(residual, inputs, ids, shares)
            return
        order = torch.from_numpy(rows.order).to(inputs.device)
        adapted, plain = order.tensor_split((rows.groups[-1][2],))
        if len(plain):
            sums = residual[plain]
            self.inner.add_to(sums, inputs[plain], ids[plain], shares[plain])
            residual[plain] = sums
        chosen, totals = ids[adapted], torch.zeros(len(adapted), residual.size(1), device=inputs.device)
        for expert in chosen.flatten().bincount().nonzero().flatten().tolist():
            places, ranks = torch.where(chosen == expert)
            outputs = self._compute(expert, inputs[adapted[places]], rows.slots[rows.order[places.cpu().numpy()]])
            totals.index_add_(0, places, outputs * shares[adapted[places], ranks].unsqueeze(1))
        residual[adapted] = (residual[adapted] + totals).to(residual.dtype)

    def _compute(self, expert: int, inputs: torch.Tensor, slots: Ints) -> torch.Tensor:
        """The outputs of an expert for some tokens, in float32."""
        rows = StepRows(slots, inputs.device)
        sums = self.inner.first(expert, inputs)
        self._first_sites[expert].add(sums, inputs, rows)
        inner = join(self.inner.gating, sums).to(inputs.dtype)
        outputs = self.inner.second(expert, inner).float()
        self._second_sites[expert].add(outputs, inner, rows)
        return outputs
