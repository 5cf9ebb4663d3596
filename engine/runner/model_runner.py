"""Runs the batches of one device: forward pass, sampling, and results back to the host.

`launch` queues a step and the copy of its results to the host, and returns at once (on the CPU: when it is computed).
`collect` waits for those results, not for later launches. Ids that the previous step sampled are taken on the device,
so a step can be launched before the previous one is collected. Sees batches, never requests. The host waits for the
device in `collect`, and in `launch` for the masks of grammars or after it ran out of memory.
"""

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from typing_extensions import override

from weft.engine.batch import Batch, Executor, RowMasks, ScoreBatch, StepResult
from weft.engine.device import Download, is_out_of_memory, mark, to_device
from weft.engine.kernels.torch.caches import Caches
from weft.engine.kernels.torch.layer_kernels import TORCH_SAMPLING
from weft.engine.layers.block import Model
from weft.engine.lora.adapters import Adapters
from weft.engine.runner.cuda_graphs import ComputedStep, StepGraphs
from weft.engine.sampling.pooling import pool
from weft.engine.sampling.sampler import SampleResult, SamplingKernels, sample
from weft.engine.sampling.scores import LogprobTensors, score, token_logprobs
from weft.engine.vision.eyes import Eyes

logger = logging.getLogger(__name__)

# Prompt positions scored at a time, because a row of logits is large.
_SCORES_AT_ONCE = 64


class Follower(Protocol):
    """A second model, which is told of every batch and may compute it too, into a cache that mirrors the runner's.

    Attributes:
        reads_hidden: Whether it reads the hidden states of all tokens.
        launches: Whether `follow` gives the device work, once requests are served.
    """

    reads_hidden: bool
    launches: bool

    def follow(self, batch: Batch, computed: ComputedStep, sampled_ids: torch.Tensor | None) -> None:
        """Take note of a batch that the runner has computed, or compute it.

        Args:
            computed: With the input ids, and the hidden states of all tokens if it reads them.
            sampled_ids: (num_rows,); None if nothing was sampled.
        """

    def prepare(self) -> bool:
        """See `ModelRunner.prepare`."""

    def give_up_memory(self) -> None:
        """See `ModelRunner.give_up_memory`."""

    def take_device_s(self) -> float:
        """Seconds that the device has spent on its other steps since the last call."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose results are on their way to the host.

    Attributes:
        samples: None if it sampled nothing.
        began: Marks the start of the step on the device; None on the CPU.
        is_pooled: Whether the last of the results are sums of hidden states.
    """

    samples: SampleResult | None
    scores: list[LogprobTensors]
    download: Download
    began: torch.cuda.Event | None
    is_pooled: bool = False


class ModelRunner(Executor[LaunchedStep]):
    """Owns a model and its caches: the executor of one rank."""

    def __init__(
        self,
        model: Model,
        caches: Caches,
        device: torch.device,
        follower: Follower | None = None,
        sampling: SamplingKernels = TORCH_SAMPLING,
        graphs: StepGraphs | None = None,
        adapters: Adapters | None = None,
        eyes: Eyes | None = None,
    ) -> None:
        """Take over a loaded model and its allocated caches.

        Args:
            follower: Is told of every step.
            graphs: Graphs of this model and these caches; without them all steps run eagerly.
            adapters: Those of this model.
            eyes: The model where it sees; None: no batch has pictures.
        """
        self._model = model
        self._caches = caches
        self._device = device
        self._follower, self._keeps_all = follower, follower is not None and follower.reads_hidden
        self._launches_more = follower is not None and follower.launches
        self._sampling = sampling
        self._graphs, self._eyes = graphs, eyes
        self._adapters, self._computing = adapters, adapters.computing if adapters else nullcontext
        self._previous_token_ids: torch.Tensor | None = None

    @override
    @torch.inference_mode()
    def launch(self, batch: Batch, masks: "Future[RowMasks] | None" = None) -> LaunchedStep:
        """Queue the forward pass of a step, wait for its masks, then queue sampling.

        Steps run in the order of their launches; placeholders come from the step launched before.

        Raises:
            RuntimeError: For example out of memory. Then the step is first launched again after `give_up_memory`,
                unless it cannot be repeated.
        """
        with self._computing(batch):
            try:
                return self.launch_once(batch, masks)
            except RuntimeError as error:
                if not (is_out_of_memory(error) and self._caches.may_repeat):
                    raise
                logger.warning("a step of %d tokens ran out of memory and is launched again", batch.num_tokens)
            # After the handler, because the error keeps alive what the step had allocated. A step may be launched
            # twice: it writes only to its own slots, and what it reads from others is already there.
            self.give_up_memory()
            return self.launch_once(batch, masks)

    @override
    @torch.inference_mode()
    def prepare(self) -> bool:
        if self._caches.prepare():
            return True
        is_recording = self._graphs is not None and self._graphs.record_next()
        return (self._follower is not None and self._follower.prepare()) or is_recording  # both models in turn

    @override
    def load_adapter(self, slot: int, folder: Path) -> "Future[str]":
        assert self._adapters is not None
        return self._adapters.load(slot, folder)

    @override
    def check_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def fill_caches(self, token_ids: torch.Tensor, batch: Batch) -> None:
        """Compute a batch with these input ids for the sake of the caches alone."""
        if self._graphs is None or self._graphs.run(batch, may_sample=False, token_ids=token_ids) is None:
            self.forward(token_ids, batch)

    def forward(self, token_ids: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """Compute the hidden states of a batch with these input ids.

        Returns:
            (num_rows, hidden_size) of the rows to be sampled, or of all tokens if prompts are scored or pooled, or the
            follower reads them; and what is tapped, see `StepCaches`.
        """
        caches = self._caches.begin(batch)
        rows, wants_all = None, self._keeps_all or batch.scores is not None or batch.pooling is not None
        if not wants_all and len(batch.row_indices) != batch.num_tokens:
            rows = to_device(batch.row_indices, self._device)
        positions = to_device(batch.lookups, self._device)
        if batch.token_types is not None:
            positions = self._model.typed(positions, to_device(batch.token_types, self._device))
        if batch.pictures and self._eyes is not None:
            return self._eyes.forward(batch.pictures, token_ids, positions, caches, rows), caches.tapped
        return self._model.forward(token_ids, positions, caches, rows), caches.tapped

    @override
    def collect(self, launched: LaunchedStep) -> StepResult:
        tensors = iter(launched.download.wait())
        samples, logprobs = launched.samples, {}
        token_ids = next(tensors).tolist() if samples is not None else []
        if samples is not None and samples.logprobs is not None:
            part = samples.logprobs.on_host(tensors)
            logprobs = dict(zip(part.rows.tolist(), token_logprobs(part), strict=True))
        scores = [entry for part in launched.scores for entry in token_logprobs(part.on_host(tensors))]
        device_s = None
        if launched.began is not None and launched.download.ended is not None:
            device_s = launched.began.elapsed_time(launched.download.ended) / 1e3
        drafts_device_s = self._follower.take_device_s() if self._follower is not None else 0.0
        pooled = next(tensors).numpy() if launched.is_pooled else None
        return StepResult(token_ids, logprobs, scores, device_s, drafts_device_s, pooled)

    @torch.inference_mode()
    def launch_once(self, batch: Batch, masks: "Future[RowMasks] | None" = None) -> LaunchedStep:
        """As `launch`, but a step that runs out of memory fails."""
        computed = None
        if self._graphs is not None:
            # A graph that samples must be the end of the step. If later work failed and the step were launched again,
            # the graph would read its own ids instead of those of the previous step.
            computed = self._graphs.run(batch, may_sample=masks is None and not self._launches_more)
        if computed is None:
            began = mark(self._device)
            token_ids = self._input_ids(batch)
            computed = ComputedStep(token_ids, *self.forward(token_ids, batch), None, began)
        samples = self._sample(batch, computed, masks) if len(batch.row_indices) else None
        scores = list(self._score(batch.scores, computed.hidden_states)) if batch.scores else []
        if self._follower is not None:
            self._follower.follow(batch, computed, samples.token_ids if samples else None)
        parts = [*([samples.logprobs] if samples and samples.logprobs else []), *scores]
        results = [tensor for part in parts for tensor in part.tensors]
        if batch.pooling is not None:
            results.append(pool(batch.pooling, computed.hidden_states))
        download = Download([*([samples.token_ids] if samples else []), *results], self._device)
        launched = LaunchedStep(samples, scores, download, computed.began, batch.pooling is not None)
        self._previous_token_ids = samples.token_ids if samples else None
        if self._graphs is not None and samples is not None and computed.sampled_ids is None:
            self._graphs.keep_sampled(samples.token_ids)
        return launched

    def _input_ids(self, batch: Batch) -> torch.Tensor:
        """(num_tokens,) on the device, with placeholders filled in."""
        token_ids = to_device(batch.token_ids, self._device)
        if not len(batch.placeholders.targets):
            return token_ids
        assert self._previous_token_ids is not None
        targets = to_device(batch.placeholders.targets, self._device)
        rows = to_device(batch.placeholders.rows, self._device)
        return token_ids.index_copy(0, targets, self._previous_token_ids[rows])

    def _sample(self, batch: Batch, computed: ComputedStep, masks: "Future[RowMasks] | None") -> SampleResult:
        if computed.sampled_ids is not None:
            return SampleResult(computed.sampled_ids, None)
        logits = self._logits(batch, computed.hidden_states)
        row_masks = masks.result() if masks is not None else None
        return sample(logits, batch.sampling, self._previous_token_ids, row_masks, kernels=self._sampling)

    def _logits(self, batch: Batch, hidden_states: torch.Tensor) -> torch.Tensor:
        """Those of the rows to be sampled."""
        if len(batch.row_indices) != len(hidden_states):
            hidden_states = hidden_states[to_device(batch.row_indices, self._device)]
        return self._model.compute_logits(hidden_states)

    def _scored_logits(self, scores: ScoreBatch, hidden_states: torch.Tensor) -> Iterator[torch.Tensor]:
        for start in range(0, len(scores.token_indices), _SCORES_AT_ONCE):
            indices = scores.token_indices[start : start + _SCORES_AT_ONCE]
            if self._adapters:
                self._adapters.keep_rows(indices)
            yield self._model.compute_logits(hidden_states[to_device(indices, self._device)])

    def give_up_memory(self) -> None:
        """Free what can be made again: graphs."""
        self.check_device()  # a step in flight may use the memory of a graph
        if self._graphs is not None:
            self._graphs.release()
        if self._follower is not None:
            self._follower.give_up_memory()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _score(self, scores: ScoreBatch, hidden_states: torch.Tensor) -> Iterator[LogprobTensors]:
        for index, logits in enumerate(self._scored_logits(scores, hidden_states)):
            part = slice(index * _SCORES_AT_ONCE, (index + 1) * _SCORES_AT_ONCE)
            yield score(logits, ScoreBatch(*(getattr(scores, f.name)[part] for f in dataclasses.fields(scores))))
