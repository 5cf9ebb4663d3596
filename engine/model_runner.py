"""Weights and cache behind one call: batch in, sampled ids out.

`launch` queues a step on the device and returns at once (on the CPU: when it is computed); `collect` waits for it.
Ids that the previous step sampled are taken from the device, so a step can be launched before the one before it is
collected. Sees batches, never requests. The host waits for the device
in `collect` only, and for the masks of grammars in `launch`.
"""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.backend import AttentionBackend, AttentionStep
from engine.batch import Batch, ScoreBatch
from engine.sampling.logprobs import LogprobTensors, score, token_logprobs
from engine.sampling.masks import RowMasks
from engine.sampling.sampler import PickIds, SampleResult, pick_ids, sample
from engine.sampling.transfer import to_device
from engine.step_result import StepResult

_SCORES_AT_ONCE = 64
"""Prompt positions whose logits exist at the same time: a row of logits is large."""


class Model(Protocol):
    """What the runner needs of a model; both run under `torch.inference_mode`."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionStep) -> torch.Tensor:
        """Hidden states (num_tokens, hidden_size) behind the last norm, for ids and positions (num_tokens,)."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(num_rows, vocab_size) float32 logits of (num_rows, hidden_size)."""


class Follower(Protocol):
    """Computes what the runner's model computes, for a cache of its own that mirrors the runner's."""

    def follow(self, token_ids: torch.Tensor, batch: Batch) -> None:
        """Compute a batch with these input ids, (num_tokens,) on the device."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose results are still on the device."""

    samples: SampleResult | None
    scores: list[LogprobTensors]


class ModelRunner:
    """Owner of the model and, through the backend, of the KV cache."""

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        device: torch.device,
        follower: Follower | None = None,
        pick_ids: PickIds = pick_ids,
    ) -> None:
        """Take over a loaded model and an allocated cache; the follower is given every step as well."""
        self._model = model
        self._backend = backend
        self._device = device
        self._follower = follower
        self._pick_ids = pick_ids
        self._previous_token_ids: torch.Tensor | None = None

    @torch.inference_mode()
    def launch(self, batch: Batch, masks: "Future[RowMasks] | None" = None) -> LaunchedStep:
        """Queue forward pass and sampling of one step.

        Steps run in the order in which they are launched; placeholders come from the step launched before. Masks are
        waited for between the two.
        """
        token_ids = to_device(batch.token_ids, self._device)  # (num_tokens,)
        if len(batch.placeholders.targets):
            assert self._previous_token_ids is not None
            targets = to_device(batch.placeholders.targets, self._device)
            rows = to_device(batch.placeholders.rows, self._device)
            token_ids = token_ids.index_copy(0, targets, self._previous_token_ids[rows])
        hidden_states = self.forward(token_ids, batch)
        samples = self._sample(batch, hidden_states, masks) if len(batch.row_indices) else None
        self._previous_token_ids = samples.token_ids if samples else None
        scores = list(self._score(batch.scores, hidden_states)) if batch.scores else []
        if self._follower is not None:
            self._follower.follow(token_ids, batch)
        return LaunchedStep(samples, scores)

    def forward(self, token_ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Write K/V of a batch with these input ids; returns hidden states (num_tokens, hidden_size)."""
        attention = self._backend.begin(batch)
        return self._model.forward(token_ids, to_device(batch.positions, self._device), attention)

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Wait for a step and bring its results to the host."""
        scores = [entry for part in launched.scores for entry in token_logprobs(part)]
        samples = launched.samples
        if samples is None:
            return StepResult([], {}, scores)
        logprobs = {}
        if samples.logprobs is not None:
            logprobs = dict(zip(samples.logprobs.rows.tolist(), token_logprobs(samples.logprobs), strict=True))
        return StepResult(samples.token_ids.tolist(), logprobs, scores)

    def _sample(self, batch: Batch, hidden_states: torch.Tensor, masks: "Future[RowMasks] | None") -> SampleResult:
        rows = hidden_states[to_device(batch.row_indices, self._device)]
        logits = self._model.compute_logits(rows)
        row_masks = masks.result() if masks is not None else None
        return sample(logits, batch.sampling, self._previous_token_ids, row_masks, self._pick_ids)

    def _score(self, scores: ScoreBatch, hidden_states: torch.Tensor) -> Iterator[LogprobTensors]:
        for start in range(0, len(scores.token_indices), _SCORES_AT_ONCE):
            part = ScoreBatch(
                *(getattr(scores, f.name)[start : start + _SCORES_AT_ONCE] for f in dataclasses.fields(scores))
            )
            rows = hidden_states[to_device(part.token_indices, self._device)]
            yield score(self._model.compute_logits(rows), part)
