"""Low-rank adapters by torch's operations, adapter by adapter."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.lora.step_rows import Delta, Site, StepRows


class TorchSite(Site):
    """The reference for all others."""

    def __init__(self, num_reserved_bytes: int) -> None:
        """Begin without adapters."""
        self.num_reserved_bytes = num_reserved_bytes
        self._deltas: dict[int, Sequence[Delta]] = {}

    @override
    def put(self, slot: int, deltas: Sequence[Delta]) -> None:
        self._deltas[slot] = deltas

    @override
    def add(self, outputs: torch.Tensor, inputs: torch.Tensor, rows: StepRows) -> None:
        for slot, places in rows.by_slot:
            deltas = self._deltas.get(slot, ())
            chosen = inputs[places] if deltas else inputs
            for first, a, b in deltas:
                added = F.linear(F.linear(chosen, a), b).to(outputs.dtype)
                outputs[:, first : first + len(b)].index_add_(0, places, added)
