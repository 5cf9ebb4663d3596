"""What a step reports beside sampled ids: log-probabilities with the most probable alternatives, and vectors.

Log-probabilities are those of the model's own distribution: before penalties, bans and temperature. Only
`token_logprobs` reads tensors, which must be on the host by then. A row's result depends on that row alone, bit for
bit. Nothing here waits for the device.

The vector of a request is made of the final hidden states of its prompt. A model's `VectorModel` says of which tokens,
and what follows. Each request has a `Pooler`, which the collector gives what `pool` added up in a step. All values are
float32.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.batch import AskedLogprobs, Floats, Ints, PoolBatch, ScoreBatch
from weft.engine.device import to_device
from weft.engine.wire.messages import AddRequest, TokenLogprobs
from weft.engine.wire.params import Pooling, VectorInfo

_NONE = np.empty(0, np.int64)

_ALIGNED_VALUES = 4
"""float32 values in 16 bytes."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of n tokens: arrays that the host knows, and tensors on the device or copied to the host.

    Attributes:
        rows: (n,) row that entry i belongs to, ascending.
        num_logprobs: (n,) alternatives that entry i asked for.
        asked_entries, asked_ids: (q,) entry that asks for an id, and the id.
        logprobs: (n,) float32, of the tokens themselves.
        top_ids: (n, max_num_logprobs) int64, most probable first, the lower id first among equals.
        top_logprobs: (n, max_num_logprobs) float32.
        asked_logprobs: (q,) float32.
    """

    rows: Ints
    num_logprobs: Ints
    asked_entries: Ints
    asked_ids: Ints
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    asked_logprobs: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors to copy to the host."""
        return self.logprobs, self.top_ids, self.top_logprobs, self.asked_logprobs

    def on_host(self, tensors: Iterator[Tensor]) -> "LogprobTensors":
        """The same with the next of these tensors, the copies of its own on the host."""
        copies = islice(tensors, len(self.tensors))
        return LogprobTensors(self.rows, self.num_logprobs, self.asked_entries, self.asked_ids, *copies)


def score(logits: Tensor, scores: ScoreBatch) -> LogprobTensors:
    """Log-probabilities of prompt tokens, from the model's logits (num_scores, vocab_size) float32, left unchanged."""
    target_ids = to_device(scores.target_ids, logits.device)
    return pick(log_softmax(logits), target_ids, np.arange(len(logits)), scores.num_logprobs)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities of logits (num_rows, vocab_size), in that shape; a row's bits depend on that row alone.

    torch's CUDA kernel sums a row in another order if the row does not begin at a multiple of 16 bytes. So rows are
    padded to a multiple.
    """
    num_missing = -logits.shape[-1] % _ALIGNED_VALUES
    if not num_missing or not logits.is_cuda:
        return torch.log_softmax(logits, -1)
    padded = torch.nn.functional.pad(logits, (0, num_missing), value=float("-inf"))
    return torch.log_softmax(padded, -1)[:, : logits.shape[-1]]


def pick(
    all_logprobs: Tensor, token_ids: Tensor, rows: Ints, num_logprobs: Ints, asked: AskedLogprobs | None = None
) -> LogprobTensors:
    """Select what to report from whole rows of log-probabilities.

    Args:
        all_logprobs: (n, vocab_size) float32.
        token_ids: (n,) int64 on the device.
        rows: (n,) row that each entry belongs to.
        num_logprobs: (n,) alternatives asked for, >= 0; at most vocab_size are given.
        asked: Ids to report whatever their rank; its rows are among `rows`.
    """
    asked_entries, asked_ids, asked_logprobs = _NONE, _NONE, all_logprobs.new_empty(0)
    if asked is not None:
        asked_entries, asked_ids = np.searchsorted(rows, asked.rows), asked.ids
        device = all_logprobs.device
        asked_logprobs = all_logprobs[to_device(asked_entries, device), to_device(asked_ids, device)]
    width = min(int(num_logprobs.max(initial=0)), all_logprobs.shape[-1])
    if width:
        top_logprobs, top_ids = top_k(all_logprobs, width)
    else:
        top_logprobs, top_ids = all_logprobs.new_empty(len(rows), 0), token_ids.new_empty(len(rows), 0)
    return LogprobTensors(
        rows=rows,
        num_logprobs=num_logprobs,
        asked_entries=asked_entries,
        asked_ids=asked_ids,
        logprobs=all_logprobs.gather(-1, token_ids[:, None])[:, 0],
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        asked_logprobs=asked_logprobs,
    )


def token_logprobs(tensors: LogprobTensors) -> list[TokenLogprobs]:
    """The entries as messages, in the order of `tensors.rows`."""
    logprobs, top_ids, top_logprobs, asked_logprobs = (tensor.tolist() for tensor in tensors.tensors)
    entries = zip(tensors.num_logprobs.tolist(), logprobs, top_ids, top_logprobs, strict=True)
    results = [TokenLogprobs(logprob, ids[:count], values[:count]) for count, logprob, ids, values in entries]
    asked = zip(tensors.asked_entries.tolist(), tensors.asked_ids.tolist(), asked_logprobs, strict=True)
    for entry, token_id, logprob in asked:
        results[entry].top_token_ids.append(token_id)
        results[entry].top_logprobs.append(logprob)
    return results


CHUNK = 128
"""Ids per chunk; about the square root of the usual vocabularies."""

_LOW_HALF = 0xFFFFFFFF


def top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row with their ids, largest first and the lower id first among equals.

    The order is total: a larger k gives the same entries with more behind them. Ids are in range even when a row is
    full of NaN.

    No row is sorted for a few ids. One streaming pass reduces it to one number per chunk of CHUNK neighbouring ids.
    Then only the chunks that can hold the answer are looked at.

    Args:
        values: (num_rows, vocab_size) float32.
        k: At least 1, at most vocab_size.

    Returns:
        (num_rows, k) float32 values and (num_rows, k) int64 ids.
    """
    vocab_size = values.shape[-1]
    maxima = _maxima(values)  # (num_rows, num_chunks)
    numbers = torch.arange(maxima.shape[-1], device=values.device)
    chunks = _ids_of(_ranks(maxima, numbers).topk(min(k, maxima.shape[-1])).values)
    ids = _member_ids(chunks)  # (num_rows, num_candidates)
    ranks = _ranks(values.gather(-1, ids.clamp(max=vocab_size - 1)), ids)
    ranks.masked_fill_(ids >= vocab_size, torch.iinfo(torch.int64).min)
    top_ids = _ids_of(ranks.topk(k).values)
    return values.gather(-1, top_ids), top_ids


def _maxima(values: Tensor) -> Tensor:
    """(num_rows, vocab_size) -> (num_rows, num_chunks), the largest value of each chunk."""
    num_whole, num_left = divmod(values.shape[-1], CHUNK)
    whole = values[:, : num_whole * CHUNK].view(len(values), num_whole, CHUNK).amax(-1)
    return torch.cat((whole, values[:, num_whole * CHUNK :].amax(-1, keepdim=True)), -1) if num_left else whole


def _member_ids(chunks: Tensor) -> Tensor:
    """(num_rows, n) chunk numbers -> (num_rows, n * CHUNK) ids; the last chunk's may pass the vocabulary's end."""
    return (chunks[:, :, None] * CHUNK + torch.arange(CHUNK, device=chunks.device)).flatten(1)


def _ranks(values: Tensor, ids: Tensor) -> Tensor:
    """int64 keys, all different, that sort by value and then by falling id."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats sort backwards as integers
    return (ordered.to(torch.int64) << 32) | (_LOW_HALF - ids)


def _ids_of(ranks: Tensor) -> Tensor:
    return _LOW_HALF - (ranks & _LOW_HALF)


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
    """Owns what the vector of one request is made of so far. Only the collector changes it.

    It takes sums over runs of tokens. No token is pooled twice, whatever is computed again after preemption.
    """

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
        if self._pooling.is_per_token or self._model.kind in _OF_EACH_TOKEN:
            return Wanted(positions, [1] * len(positions))
        return Wanted(positions, [len(positions)] if positions else [])

    def take(self, wanted: Wanted, rows: Sequence[Floats]) -> None:
        """Take the sums that the step computed."""
        if wanted.positions:
            self._missing = range(wanted.positions.stop, self._missing.stop)
            if self._pooling.is_per_token:
                self._rows += rows
            elif self._model.kind == "max":
                self._rows = [np.maximum.reduce([*self._rows, *rows])]
            else:
                weighs = self._model.kind == "weightedmean"
                for position, row in zip(wanted.positions if weighs else [0], rows, strict=True):
                    weighted: Floats = row * np.float32(position + 1) if weighs else row
                    self._rows = [self._rows[0] + weighted if self._rows else weighted]

    def vector(self) -> Floats:
        """(num_rows, size) the finished vector, or the hidden states of all tokens."""
        pooling, model = self._pooling, self._model
        if pooling.is_per_token:
            return np.stack([row[: pooling.dimensions] for row in self._rows])
        length = self._num_tokens
        divisors = {"mean": length, "mean_sqrt_len": math.sqrt(length), "weightedmean": length * (length + 1) / 2}
        pooled = self._rows[0] / np.float32(divisors[model.kind]) if model.kind in divisors else self._rows[0]
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
