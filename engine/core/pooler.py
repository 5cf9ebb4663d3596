"""Makes the vector of a request from the final hidden states of its prompt.

A model's `VectorModel` says of which tokens, and what follows. Each request has a `Pooler`, which the collector gives
the hidden states that a step computed, as sums over runs of tokens. No token is pooled twice, whatever is computed
again after preemption. All values are float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from weft.engine.shared.messages import AddRequest
from weft.engine.shared.vectors import Pooling, VectorInfo
from weft.engine.step.batch import Floats

MAX_VALUES = 4 << 20
"""Most values of the vectors of one request: 16 MiB in a message."""

PoolingKind = Literal["last", "mean", "cls"]
"""Of which hidden states a vector is made: the last token's, the mean over all tokens, or the first token's."""


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


def unit_length(values: Floats) -> Floats:
    """The values divided by their Euclidean norm; zeros stay as they are."""
    scaled: Floats = values / np.maximum(np.linalg.norm(values), np.float32(1e-12))
    return scaled


class Wanted(NamedTuple):
    """Positions of the prompt whose hidden states a step has, and how many of them each sum takes."""

    positions: range
    lengths: Sequence[int]


class Pooler:
    """Owns what the vector of one request is made of so far. Only the collector changes it."""

    def __init__(self, model: VectorModel, pooling: Pooling, num_tokens: int) -> None:
        """Start without hidden states; num_tokens is the length of the prompt."""
        self._model = model
        self._pooling = pooling
        self._num_tokens = num_tokens
        first = num_tokens - 1 if model.kind == "last" and not pooling.is_per_token else 0
        is_first = model.kind == "cls" and not pooling.is_per_token
        self._missing = range(first, 1 if is_first else num_tokens)
        self.needs_whole_prompt = first == 0
        """Whether no part of the prompt may come from the prefix cache, which has no hidden states."""
        self._rows: list[Floats] = []

    @property
    def is_complete(self) -> bool:
        """Whether it has all hidden states that it needs."""
        return not self._missing

    def wanted(self, start: int, num_tokens: int) -> Wanted:
        """What it needs of a step that computes num_tokens positions from start."""
        first = max(start, self._missing.start)
        positions = range(first, max(first, min(start + num_tokens, self._missing.stop)))
        if self._pooling.is_per_token:
            return Wanted(positions, [1] * len(positions))
        return Wanted(positions, [len(positions)] if positions else [])

    def take(self, wanted: Wanted, rows: Sequence[Floats]) -> None:
        """Take the sums that the step computed."""
        if wanted.positions:
            self._missing = range(wanted.positions.stop, self._missing.stop)
            is_sum = self._rows and not self._pooling.is_per_token
            self._rows = [self._rows[0] + rows[0]] if is_sum else [*self._rows, *rows]

    def vector(self) -> Floats:
        """(num_rows, size) the finished vector, or the hidden states of all tokens."""
        pooling, model = self._pooling, self._model
        if pooling.is_per_token:
            return np.stack([row[: pooling.dimensions] for row in self._rows])
        pooled = self._rows[0] / np.float32(self._num_tokens) if model.kind == "mean" else self._rows[0]
        values = model.head(pooled)[: pooling.dimensions]
        is_finished = model.is_finished if pooling.is_finished is None else pooling.is_finished
        return (model.finish(values) if is_finished else values)[None].astype(np.float32, copy=False)


def pooling_fault(add: AddRequest, pooling: Pooling, model: VectorModel | None) -> str | None:
    """What is wrong with a request for a vector; None when nothing is."""
    if model is None:
        return "this engine makes no vectors: its task is generate"
    if add.sampling_params.max_tokens != 0 or add.num_choices != 1 or add.beams is not None:
        return "a request for a vector must have max_tokens 0, one choice and no beams"
    if add.guidance.grammar is not None or add.sampling_params.prompt_logprobs is not None:
        return "a request for a vector must have no grammar and no prompt_logprobs"
    size = model.info.hidden_size if pooling.is_per_token else model.info.size
    if pooling.dimensions is not None and not 1 <= pooling.dimensions <= size:
        return f"dimensions must be between 1 and {size}, got {pooling.dimensions}"
    num_values = len(add.input.token_ids) * size if pooling.is_per_token else size
    if num_values > MAX_VALUES:
        return f"the vectors of all tokens must have at most {MAX_VALUES} values together, got {num_values}"
    return None
