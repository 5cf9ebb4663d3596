"""The seam for samplers inside a CUDA graph, and the greedy one.

A graph samples rows whose logits are not edited and that report nothing but the id. All other rows are sampled after
the graph. Parameters are copied into memory that stays in place.
"""

from typing import Protocol

import numpy as np
from torch import Tensor
from typing_extensions import override

from weft.engine.step.batch import Floats, SamplingBatch


class GraphSampler(Protocol):
    """Samples in a graph the same ids as `PickIds` outside of it."""

    def can_sample(self, batch: SamplingBatch) -> bool:
        """Whether the graph can sample these rows, which are plain (`is_plain`)."""

    def parameters(self, batch: SamplingBatch, num_rows: int) -> Floats:
        """What `sample` needs of each row, (n, num_rows); rows beyond the batch's own are padding."""

    def sample(self, logits: Tensor, parameters: Tensor) -> Tensor:
        """Logits (num_rows, vocab_size) float32, may be overwritten -> (num_rows,) int64. Never waits."""


class GreedySampler(GraphSampler):
    """Picks the most probable ids; needs no parameters."""

    @override
    def can_sample(self, batch: SamplingBatch) -> bool:
        return not batch.temperatures.any()

    @override
    def parameters(self, batch: SamplingBatch, num_rows: int) -> Floats:
        return np.zeros((0, num_rows), np.float32)

    @override
    def sample(self, logits: Tensor, parameters: Tensor) -> Tensor:
        return logits.argmax(-1)


def is_plain(batch: SamplingBatch) -> bool:
    """Whether no logit is edited and only ids are reported. Grammar masks are not part of a batch."""
    others = (batch.penalties, batch.conditional_bans, batch.asked_logprobs)
    is_edited = len(batch.bias_rows) or len(batch.allowed_rows) or any(other is not None for other in others)
    return not is_edited and bool((batch.num_logprobs < 0).all())
