"""What a step reports beside sampled ids: log-probabilities with the most probable alternatives.

Log-probabilities are those of the model's own distribution: before penalties, bans and temperature. Only
`token_logprobs` reads tensors, which must be on the host by then. A row's result depends on that row alone, bit for
bit. Nothing here waits for the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from weft.engine.batch import AskedLogprobs, Ints, ScoreBatch
from weft.engine.device import to_device
from weft.engine.wire.messages import TokenLogprobs

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
