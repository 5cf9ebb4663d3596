"""Adds up the final hidden states of tokens, for vectors."""

import torch
from torch import Tensor

from weft.engine.step.pool_batch import PoolBatch
from weft.engine.step.transfer import to_device


def pool(batch: PoolBatch, hidden_states: Tensor) -> Tensor:
    """(num_runs, hidden_size) float32 sums over runs of tokens, added up in their order."""
    rows = hidden_states[to_device(batch.token_indices, hidden_states.device)].float()
    if len(batch.lengths) == len(rows):
        return rows
    lengths = to_device(batch.lengths, hidden_states.device)
    return torch.segment_reduce(rows, "sum", lengths=lengths, axis=0)
