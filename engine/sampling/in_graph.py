"""The seam to samplers that a CUDA graph can hold: parameters in memory that stays in place, then logits to ids.

For rows whose logits stay as the model gave them and of which nothing is reported but the id; others are sampled
behind the graph.
"""

from typing import Protocol

import numpy as np
from torch import Tensor

from weft.engine.sampling import chunks
from weft.engine.step.batch import Floats, SamplingBatch


class GraphSampler(Protocol):
    """Samples in a graph what `PickIds` samples outside of it, id for id."""

    def kind(self, batch: SamplingBatch) -> int | None:
        """Which work samples such rows: batches of one kind share graphs. None when no graph does."""

    def parameters(self, batch: SamplingBatch, num_rows: int) -> Floats:
        """What `sample` has to know of each row, (n, num_rows); those behind the batch's own are padding."""

    def sample(self, logits: Tensor, parameters: Tensor, kind: int) -> Tensor:
        """Logits (num_rows, vocab_size) float32, which it may overwrite -> (num_rows,) int64; waits for nothing."""


class GreedySampler:
    """The most probable ids, which need no parameters."""

    def kind(self, batch: SamplingBatch) -> int | None:
        """See `GraphSampler`."""
        return None if batch.temperatures.any() else 0

    def parameters(self, batch: SamplingBatch, num_rows: int) -> Floats:
        """See `GraphSampler`."""
        return np.zeros((0, num_rows), np.float32)

    def sample(self, logits: Tensor, parameters: Tensor, kind: int) -> Tensor:
        """See `GraphSampler`."""
        return chunks.argmax(logits)


def is_plain(batch: SamplingBatch) -> bool:
    """Whether no logit is edited and nothing reported but ids. Masks are not part of a batch."""
    others = (batch.penalties, batch.conditional_bans, batch.asked_logprobs)
    is_edited = len(batch.bias_rows) or len(batch.allowed_rows) or any(other is not None for other in others)
    return not is_edited and bool((batch.num_logprobs < 0).all())
