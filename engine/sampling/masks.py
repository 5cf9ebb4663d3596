"""Masks over the vocabulary, for rows where only some ids may be sampled.

A mask acts as 0 or -inf added to the logits: adding streams through memory, several times faster on a CPU than
filling by a boolean mask.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.sampling.transfer import to_device
from engine.step_result import NO_TOKEN_ID

Bits = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of some rows of a step.

    Attributes:
        rows: (n,) int64, rising.
        bits: (n, vocab_size / 32, rounded up); the lowest bit is the lowest id, 1 allows.
        unpack: Makes of them (n, vocab_size) float32 on the device: 0 where an id is allowed, -inf elsewhere.
    """

    rows: npt.NDArray[np.int64]
    bits: Bits
    unpack: Callable[[Bits], Tensor]

    def apply(self, logits: Tensor) -> None:
        """Ban what is not allowed, in place."""
        biases = self.unpack(self.bits)
        if len(self.rows) == len(logits):
            logits.add_(biases)
        else:
            logits.index_add_(0, to_device(self.rows, logits.device), biases)

    def are_empty(self, logits: Tensor) -> Tensor:
        """Where the edited logits of a masked row leave nothing, (n,) bool."""
        return logits.index_select(0, to_device(self.rows, logits.device)).amax(-1) == float("-inf")

    def withdraw(self, token_ids: Tensor, is_empty: Tensor) -> None:
        """Replace what was sampled from those by NO_TOKEN_ID, in place."""
        rows = to_device(self.rows, token_ids.device)
        token_ids.index_copy_(0, rows, token_ids[rows].masked_fill(is_empty, NO_TOKEN_ID))


class MaskUnpacker:
    """Turns one bit per id into what is added to a logit. Owns its memory: fresh pages cost more than the work."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Start with no memory; results are (n, vocab_size) float32 on the device."""
        self._vocab_size = vocab_size
        self._device = device
        is_allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._table = torch.from_numpy(np.where(is_allowed, 0, -np.inf).astype(np.float32)).to(device)  # (256, 8)
        self._memory = torch.empty((0, 8), device=device)

    def unpack(self, bits: Bits) -> Tensor:
        """See `RowMasks`; the result is good until the next call."""
        octets = to_device(bits.view(np.uint8).reshape(-1), self._device).to(torch.int32)
        if len(self._memory) < len(octets):
            self._memory = torch.empty((len(octets), 8), device=self._device)
        torch.index_select(self._table, 0, octets, out=self._memory[: len(octets)])
        return self._memory[: len(octets)].view(len(bits), -1)[:, : self._vocab_size]
