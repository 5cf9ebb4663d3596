"""Attention of a step with pictures whose tokens see each other, in the layers where they do (Gemma 3, Gemma 4).

The step is computed like any other one, so that each token sees what is before it, and all keys and values are written.
Then the tokens of pictures attend once more, and that result counts. To the backend they are another step over the same
blocks: each run of a picture's tokens is a request of its own, whose tokens see everything from the first position of
their window to the end of the run. Steps without pictures know nothing of all this.
"""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from weft.engine.batch import Batch
from weft.engine.device import to_device
from weft.engine.kernels.torch.encoder_step import some_tokens
from weft.engine.layers.block import AttentionBackend, AttentionStep, Heads, PagedCache


@runtime_checkable
class ReadingStep(Protocol):
    """A step whose keys and values are there already."""

    def read(self, layer: int, queries: Tensor) -> Tensor:
        """Attend from the tokens of the step, (num_tokens, num_heads, head_dim); as `AttentionStep.attend`."""


class MutualStep(AttentionStep):
    """Attention of the whole step, and then of the tokens of pictures."""

    def __init__(self, whole: AttentionStep, runs: ReadingStep, tokens: Tensor, layers: frozenset[int]) -> None:
        """Take the step of runs, whose tokens have these indices in the whole step, and the layers that it is for."""
        self._whole, self._runs, self._tokens, self._layers = whole, runs, tokens, layers

    @override
    def cache(self, layer: int) -> PagedCache | None:
        return self._whole.cache(layer)

    @override
    def attend(self, layer: int, heads: Heads, sinks: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        attended = self._whole.attend(layer, heads, sinks, bias)
        if layer not in self._layers:
            return attended
        attended = attended.clone()  # which may be memory that the backend uses again
        return attended.index_copy_(0, self._tokens, self._runs.read(layer, heads[0].index_select(0, self._tokens)))


@dataclass(frozen=True, slots=True)
class MutualCaches:
    """Begins the steps with pictures of a model that has such layers."""

    layers: frozenset[int]
    device: torch.device

    def begin(self, backend: AttentionBackend, batch: Batch) -> AttentionStep:
        """Attention of a step with pictures. Where the first tokens of a run are cached, the step has all others."""
        whole = backend.begin(batch)
        parts = [np.split(each.targets, np.flatnonzero(np.diff(each.targets) > 1) + 1) for each in batch.pictures]
        runs = [run for part in parts for run in part if len(run)]
        if not runs:
            return whole
        tokens, ends = np.concatenate(runs), np.array([run[-1] for run in runs])
        starts = np.cumsum([0, *map(len, runs)])
        requests = np.searchsorted(batch.query_start_locs, ends, side="right") - 1
        seen = some_tokens(batch, tokens, starts, batch.positions[ends] + 1, requests)
        step = backend.begin(replace(seen, pictures=(), is_mutual=True))
        assert isinstance(step, ReadingStep)
        return MutualStep(whole, step, to_device(tokens, self.device), self.layers)
