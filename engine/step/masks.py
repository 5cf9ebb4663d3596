"""Masks over the vocabulary, for rows where only some ids may be sampled.

Plain data, so that a mask can be sent to another process. What is applied to logits here is for torch's sampler; Weft's
own kernels read the bits.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.engine.step.step_result import NO_TOKEN_ID
from weft.engine.step.transfer import to_device

Bits = npt.NDArray[np.int32]

_OCTETS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BIASES = torch.from_numpy(np.where(_OCTETS, np.float32(0), np.float32(-np.inf)))
"""(256, 8) what eight ids' bits add to their logits. Adding is several times faster on a CPU than filling by a mask."""


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of some rows of a step.

    Attributes:
        rows: (n,) int64, rising.
        bits: (n, vocab_size / 32, rounded up); the lowest bit is the lowest id, 1 allows.
    """

    rows: npt.NDArray[np.int64]
    bits: Bits

    def apply(self, logits: Tensor) -> None:
        """Ban what is not allowed in logits (num_rows, vocab_size), in place."""
        device = logits.device
        octets = to_device(self.bits.view(np.uint8).reshape(-1), device).to(torch.int32)
        biases = torch.index_select(_BIASES.to(device), 0, octets).view(len(self.rows), -1)[:, : logits.shape[1]]
        if len(self.rows) == len(logits):
            logits.add_(biases)
        else:
            logits.index_add_(0, to_device(self.rows, device), biases)

    def are_empty(self, logits: Tensor) -> Tensor:
        """Where the edited logits of a masked row leave nothing, (n,) bool."""
        return logits.index_select(0, to_device(self.rows, logits.device)).amax(-1) == float("-inf")

    def withdraw(self, token_ids: Tensor, is_empty: Tensor) -> None:
        """Replace what was sampled from those by NO_TOKEN_ID, in place."""
        rows = to_device(self.rows, token_ids.device)
        token_ids.index_copy_(0, rows, token_ids[rows].masked_fill(is_empty, NO_TOKEN_ID))
