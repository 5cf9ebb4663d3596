"""The seam between the runner and whatever computes hidden states and logits."""

from typing import Protocol

import torch

from weft.engine.kernels.caches import StepCaches


class Model(Protocol):
    """What the runner needs of a model; both run under `torch.inference_mode` and do not wait for the device."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: StepCaches,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states behind the last norm, for ids and positions (num_tokens,): of all tokens or those in `rows`."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(num_rows, vocab_size) float32 logits of (num_rows, hidden_size), which the next call may overwrite."""
