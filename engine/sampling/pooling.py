"""Vectors of prompts, made of their final hidden states.

A model's `VectorModel` says of which tokens, and what follows. Each request has a `Pooler`, which the collector gives
what `pool` added up in a step. All values are float32.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from weft.engine.batch import Floats
from weft.engine.batch_inputs import PoolBatch
from weft.engine.device import to_device
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.params import Pooling, VectorInfo

MAX_VALUES = 4 << 20
"""Most values of the vectors of one request: 16 MiB in a message."""

PoolingKind = Literal["last", "mean", "cls", "max", "mean_sqrt_len", "weightedmean"]
"""Of which hidden states a vector is made: the last or the first token's, or of all tokens the mean, the sum divided by
the root of their number, the mean weighted by position from 1 on, or the largest of each value."""
_OF_EACH_TOKEN = ("max", "weightedmean")
"""Kinds that no sum over a run of tokens gives."""


@dataclass(frozen=True, slots=True)
class VectorModel:
    """How a model's vectors are made.

    Attributes:
        head: (n,) pooled values -> (size,) values, before the last step.
        finish: The last step: (size,) -> (size,), such as probabilities of a classifier.
        is_finished: Whether the last step follows unless a request asks otherwise.
    """

    kind: PoolingKind
    head: Callable[[Floats], Floats]
    finish: Callable[[Floats], Floats]
    is_finished: bool
    info: VectorInfo

    def pooler(self, pooling: Pooling, num_input_slots: int, num_tokens: int) -> "Pooler":
        """Of a prompt of num_tokens, without an encoder's input."""
        del num_input_slots
        if pooling.is_per_token:
            return Pooler(range(num_tokens), pooling.dimensions)
        return _VectorPooler(self, pooling, num_tokens)

    def fault(self, pooling: Pooling, num_tokens: int) -> str | None:
        """What is wrong with a request for the vector of so many tokens; None when nothing is."""
        if pooling.aligned is not None:
            return "this model does not hear, so nothing can be aligned"
        size = self.info.hidden_size if pooling.is_per_token else self.info.size
        if pooling.dimensions is not None and not 1 <= pooling.dimensions <= size:
            return f"dimensions must be between 1 and {size}, got {pooling.dimensions}"
        num_values = num_tokens * size if pooling.is_per_token else size
        if num_values > MAX_VALUES:
            return f"the vectors of all tokens must have at most {MAX_VALUES} values together, got {num_values}"
        return None


def unit_length(values: Floats) -> Floats:
    """The values divided by their Euclidean norm; zeros stay as they are."""
    scaled: Floats = values / np.maximum(np.linalg.norm(values), np.float32(1e-12))
    return scaled


def pool(batch: PoolBatch, hidden_states: Tensor) -> Tensor:
    """(num_runs, hidden_size) float32 sums over runs of tokens, added up in their order."""
    rows = hidden_states[to_device(batch.token_indices, hidden_states.device)].float()
    if len(batch.lengths) == len(rows):
        return rows
    lengths = to_device(batch.lengths, hidden_states.device)
    return torch.segment_reduce(rows, "sum", lengths=lengths, axis=0)


class Wanted(NamedTuple):
    """Positions of the prompt whose hidden states a step has, and how many of them each sum takes."""

    positions: range
    lengths: Sequence[int]


class Pooler:
    """Owns the hidden states that one request has so far, each token's. Only the collector changes it.

    No token is taken twice, whatever is computed again after preemption.

    Attributes:
        needs_whole_prompt: Whether no part of the prompt may come from the prefix cache, which has no hidden states.
    """

    def __init__(self, needed: range, dimensions: int | None = None, *, needs_whole_prompt: bool = True) -> None:
        """Start without hidden states.

        Args:
            needed: Positions in the prompt.
            dimensions: So many leading values are kept; None keeps all.
        """
        self._missing = needed
        self._dimensions = dimensions
        self._rows: list[Floats] = []
        self.needs_whole_prompt = needs_whole_prompt

    @property
    def is_complete(self) -> bool:
        """Whether it has all hidden states that it needs."""
        return not self._missing

    def wanted(self, start: int, num_tokens: int) -> Wanted:
        """What it needs of a step that computes num_tokens positions from start."""
        first = max(start, self._missing.start)
        positions = range(first, max(first, min(start + num_tokens, self._missing.stop)))
        return Wanted(positions, [1] * len(positions))

    def take(self, wanted: Wanted, rows: Sequence[Floats]) -> None:
        """Take the sums that the step computed."""
        if wanted.positions:
            self._missing = range(wanted.positions.stop, self._missing.stop)
            self._add(wanted.positions, rows)

    def _add(self, positions: range, rows: Sequence[Floats]) -> None:
        del positions
        self._rows += rows

    def vector(self) -> Floats:
        """(num_rows, size) what they are collected for: here the hidden states of all tokens."""
        return np.stack([row[: self._dimensions] for row in self._rows])


class _VectorPooler(Pooler):
    """Takes sums over runs of tokens."""

    def __init__(self, model: VectorModel, pooling: Pooling, num_tokens: int) -> None:
        first = num_tokens - 1 if model.kind == "last" else 0
        needed = range(first, 1 if model.kind == "cls" else num_tokens)
        super().__init__(needed, pooling.dimensions, needs_whole_prompt=first == 0)
        self._model, self._pooling, self._num_tokens = model, pooling, num_tokens

    @override
    def wanted(self, start: int, num_tokens: int) -> Wanted:
        wanted = super().wanted(start, num_tokens)
        if self._model.kind in _OF_EACH_TOKEN or not wanted.positions:
            return wanted
        return Wanted(wanted.positions, [len(wanted.positions)])

    @override
    def _add(self, positions: range, rows: Sequence[Floats]) -> None:
        if self._model.kind == "max":
            self._rows = [np.maximum.reduce([*self._rows, *rows])]
            return
        weighs = self._model.kind == "weightedmean"
        for position, row in zip(positions if weighs else [0], rows, strict=True):
            weighted: Floats = row * np.float32(position + 1) if weighs else row
            self._rows = [self._rows[0] + weighted if self._rows else weighted]

    @override
    def vector(self) -> Floats:
        pooling, model, length = self._pooling, self._model, self._num_tokens
        divisors = {"mean": length, "mean_sqrt_len": math.sqrt(length), "weightedmean": length * (length + 1) / 2}
        pooled = self._rows[0] / np.float32(divisors[model.kind]) if model.kind in divisors else self._rows[0]
        values = model.head(pooled)[: pooling.dimensions]
        is_finished = model.is_finished if pooling.is_finished is None else pooling.is_finished
        return (model.finish(values) if is_finished else values)[None].astype(np.float32, copy=False)


class PooledModel(Protocol):
    """Makes something of hidden states: vectors, or what `Pooling` asks for in their place."""

    def pooler(self, pooling: Pooling, num_input_slots: int, num_tokens: int) -> Pooler:
        """What a request of num_tokens tokens, of which the first ones are an encoder's input, collects."""

    def fault(self, pooling: Pooling, num_tokens: int) -> str | None:
        """What is wrong with a request of so many tokens, without the input; None when nothing is."""


def pooling_fault(add: AddRequest, pooling: Pooling, model: PooledModel | None) -> str | None:
    """What is wrong with a request for a vector; None when nothing is."""
    if model is None and pooling.aligned is not None:
        return "a text is aligned with a sound on one rank only, by a model that names its heads for it"
    if model is None:
        return "this engine makes no vectors: its task is generate"
    if add.sampling_params.max_tokens != 0 or add.num_choices != 1 or add.beams is not None:
        return "a request for a vector must have max_tokens 0, one choice and no beams"
    if add.guidance.grammar is not None or add.sampling_params.prompt_logprobs is not None:
        return "a request for a vector must have no grammar and no prompt_logprobs"
    return model.fault(pooling, len(add.input.token_ids))
