"""Log-probabilities of ids that were sampled, or of prompt ids that are scored, and their best alternatives.

Owns the way from a row of logits to `TokenLogprobs`. They are always of the model's own distribution: before
penalties, bans and temperature. `token_logprobs` would wait for tensors that are still on the device.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.engine.sampling import chunks
from weft.engine.shared.messages import TokenLogprobs
from weft.engine.step.batch import AskedLogprobs, Ints, ScoreBatch
from weft.engine.step.transfer import to_device

_NONE = np.empty(0, np.int64)

_ALIGNED_VALUES = 4
"""Values of float32 in 16 bytes."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of n tokens, on the device or brought to the host; what the host knew before is in arrays.

    Attributes:
        rows: (n,) host, row that entry i belongs to, rising.
        num_logprobs: (n,) host, alternatives that entry i asked for.
        logprobs: (n,) float32, of the tokens themselves.
        top_ids: (n, max_num_logprobs) int64, most probable first, the lower id first among equals.
        top_logprobs: (n, max_num_logprobs) float32.
        asked_entries, asked_ids: (q,) host, entry that asks for an id, and the id.
        asked_logprobs: (q,) float32.
    """

    rows: Ints
    num_logprobs: Ints
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    asked_entries: Ints
    asked_ids: Ints
    asked_logprobs: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What has to be brought to the host."""
        return self.logprobs, self.top_ids, self.top_logprobs, self.asked_logprobs

    def on_host(self, tensors: Iterator[Tensor]) -> "LogprobTensors":
        """The same with the next tensors, those of `tensors` on the host."""
        logprobs, top_ids, top_logprobs, asked_logprobs = (next(tensors) for _ in self.tensors)
        return dataclasses.replace(
            self, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs, asked_logprobs=asked_logprobs
        )


def score(logits: Tensor, scores: ScoreBatch) -> LogprobTensors:
    """Log-probabilities of prompt tokens from the model's own logits (num_scores, vocab_size) float32, not changed."""
    target_ids = to_device(scores.target_ids, logits.device)
    return pick(log_softmax(logits), target_ids, np.arange(len(logits)), scores.num_logprobs)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities (num_rows, vocab_size) of logits of that shape, each row's bits from that row alone.

    torch's kernel for CUDA adds up a row from where 16 bytes are aligned, in another order if not all rows begin there.
    """
    num_missing = -logits.shape[-1] % _ALIGNED_VALUES
    if not num_missing or not logits.is_cuda:
        return torch.log_softmax(logits, -1)
    padded = torch.nn.functional.pad(logits, (0, num_missing), value=float("-inf"))
    return torch.log_softmax(padded, -1)[:, : logits.shape[-1]]


def pick(
    all_logprobs: Tensor, token_ids: Tensor, rows: Ints, num_logprobs: Ints, asked: AskedLogprobs | None = None
) -> LogprobTensors:
    """What to report out of whole rows of log-probabilities.

    Args:
        all_logprobs: (n, vocab_size) float32.
        token_ids: (n,) int64 on the device.
        rows: (n,) row that each entry belongs to.
        num_logprobs: (n,) alternatives asked for, >= 0; more than vocab_size gives vocab_size.
        asked: Ids to report whatever their rank; its rows are among `rows`.
    """
    asked_entries, asked_ids, asked_logprobs = _NONE, _NONE, all_logprobs.new_empty(0)
    if asked is not None:
        asked_entries, asked_ids = np.searchsorted(rows, asked.rows), asked.ids
        device = all_logprobs.device
        asked_logprobs = all_logprobs[to_device(asked_entries, device), to_device(asked_ids, device)]
    width = min(int(num_logprobs.max(initial=0)), all_logprobs.shape[-1])
    if width:
        top_logprobs, top_ids = chunks.top_k(all_logprobs, width)
    else:
        top_logprobs, top_ids = all_logprobs.new_empty(len(rows), 0), token_ids.new_empty(len(rows), 0)
    return LogprobTensors(
        rows=rows,
        num_logprobs=num_logprobs,
        logprobs=all_logprobs.gather(-1, token_ids[:, None])[:, 0],
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        asked_entries=asked_entries,
        asked_ids=asked_ids,
        asked_logprobs=asked_logprobs,
    )


def token_logprobs(tensors: LogprobTensors) -> list[TokenLogprobs]:
    """The entries as messages, in the order of `tensors.rows`."""
    entries = zip(
        tensors.num_logprobs.tolist(),
        tensors.logprobs.tolist(),
        tensors.top_ids.tolist(),
        tensors.top_logprobs.tolist(),
        strict=True,
    )
    results = [TokenLogprobs(logprob, ids[:count], values[:count]) for count, logprob, ids, values in entries]
    asked = zip(
        tensors.asked_entries.tolist(), tensors.asked_ids.tolist(), tensors.asked_logprobs.tolist(), strict=True
    )
    for entry, token_id, logprob in asked:
        results[entry].top_token_ids.append(token_id)
        results[entry].top_logprobs.append(logprob)
    return results
