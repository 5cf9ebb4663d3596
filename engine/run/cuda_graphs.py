"""Runs decode steps as CUDA graphs: a step is recorded once, then queued again with one call.

A batch in which every request computes one token and samples it is padded to one of a few sizes. A size is recorded
after it has occurred, so no request waits for a recording before its first token. A graph reads and writes memory that
never moves: input ids, positions, what the attention backend keeps (`supports_graphs`), and the parameters of its rows
if it also samples. This module owns that memory, the graphs, and the ids that the previous step sampled. Other steps
run eagerly. Only CUDA needs this, but with another `Capture` the logic runs on any device.
"""

import bisect
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.kernels.caches import Caches
from weft.engine.models.decoder import Model
from weft.engine.sampling.in_graph import GraphSampler, GreedySampler, is_plain
from weft.engine.step.batch import Batch, GroupBatch, Ints
from weft.engine.step.capture import Capture, CudaCapture
from weft.engine.step.out_of_memory import is_out_of_memory
from weft.engine.step.transfer import fill, mark, to_device

logger = logging.getLogger(__name__)

# Steps of a size that run eagerly before it is recorded, which takes as long as a few of them.
_NUM_EAGER_STEPS = 2

# Steps of a size that run eagerly after memory was missing to record it.
_NUM_STEPS_WITHOUT_MEMORY = 1000

_PADDING_SLOT = -1
_NO_SOURCE = -1


class GraphKey(NamedTuple):
    """What graphs differ in: the number of rows, and the `GraphSampler.kind`; None if the graph does not sample."""

    num_rows: int
    sampling: int | None


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded step.

    Attributes:
        inputs: (3, num_rows) int64, see `_inputs`.
        parameters: (n, num_rows) float32, see `GraphSampler`.
        replay: Queues the step.
        hidden_states: (num_rows, hidden_size) outputs.
    """

    inputs: Tensor
    parameters: Tensor
    replay: Callable[[], None]
    hidden_states: Tensor


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """The forward pass of a step, queued.

    Attributes:
        token_ids: (num_tokens,) input ids with placeholders filled in; from a graph valid until the next launch.
        hidden_states: (num_rows, hidden_size), or (num_tokens, ...) if prompts are scored; valid as long.
        sampled_ids: (num_rows,) int64; None if the rows are still to be sampled.
        began: Marks the start of the step on the device; None on the CPU.
    """

    token_ids: Tensor
    hidden_states: Tensor
    sampled_ids: Tensor | None
    began: torch.cuda.Event | None


class DecodeGraphs:
    """Owns the graphs of one model and their memory. Used only by its runner."""

    def __init__(
        self,
        model: Model,
        caches: Caches,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_num_rows: int,
        sampler: GraphSampler | None = None,
        make_capture: Callable[[], Capture] = CudaCapture,
    ) -> None:
        """Start with no graph.

        Args:
            max_num_seqs: Most requests of a step.
            max_num_rows: Most rows that any step samples.
            sampler: Samples in graphs; None means graphs sample greedily only.
            make_capture: Makes the memory pool of the graphs, and a new one after `release`.
        """
        assert caches.supports_graphs
        self._model = model
        self._caches = caches
        self._device = device
        self._sizes = graph_sizes(max_num_seqs)
        self._sampled_ids = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        self._kept_ids = torch.empty_like(self._sampled_ids)  # a copy, while a recording overwrites them
        self._sampler = sampler or GreedySampler()
        self._make_capture = make_capture
        self._capture: Capture | None = None
        self._graphs: dict[GraphKey, _Graph] = {}
        self._num_eager_steps: Counter[GraphKey] = Counter()
        self._padding: Batch | None = None
        self._has_failed = False

    def keep_sampled(self, token_ids: Tensor) -> None:
        """Keep ids that were sampled outside of a graph, for the placeholders of the next step."""
        self._sampled_ids[: len(token_ids)].copy_(token_ids)

    def run(self, batch: Batch, *, may_sample: bool) -> ComputedStep | None:
        """Queue a batch as a graph; returns None and queues nothing if it has to run eagerly.

        Args:
            may_sample: Whether the graph may sample, if its sampler can.
        """
        if not _is_decode(batch) or batch.num_requests > self._sizes[-1]:
            return None
        kind = self._sampler.kind(batch.sampling) if may_sample and is_plain(batch.sampling) else None
        key = GraphKey(self._sizes[bisect.bisect_left(self._sizes, batch.num_requests)], kind)
        if key not in self._graphs:
            self._num_eager_steps[key] += 1
            self._padding = self._padding or _without_requests(batch)
            if self._num_eager_steps[key] <= _NUM_EAGER_STEPS or not self._record(key):
                return None
        graph, num_rows = self._graphs[key], batch.num_requests
        self._caches.begin(pad(batch, key.num_rows))
        fill(graph.inputs, _inputs(batch, key.num_rows))
        if graph.parameters.numel():
            fill(graph.parameters, self._sampler.parameters(batch.sampling, key.num_rows))
        began = mark(self._device)
        graph.replay()
        sampled_ids = self._sampled_ids[:num_rows].clone() if key.sampling is not None else None
        return ComputedStep(graph.inputs[0, :num_rows], graph.hidden_states[:num_rows], sampled_ids, began)

    def record_next(self) -> bool:
        """Record one size that has occurred and has no graph; returns whether there are more such sizes."""
        missing = [key for key, number in self._num_eager_steps.items() if key not in self._graphs and number > 0]
        return bool(missing) and self._record(missing[0]) and len(missing) > 1

    def release(self) -> None:
        """Drop all graphs and so free their memory; they are recorded again when needed."""
        self._graphs.clear()
        self._num_eager_steps.clear()
        self._capture = None

    def _record(self, key: GraphKey) -> bool:
        """Record a step of padding, which touches no request. Returns False if this fails, or has failed before.

        Existing graphs stay. If only memory was missing, a much later step tries again.
        """
        self._kept_ids.copy_(self._sampled_ids)
        try:
            if not self._has_failed:
                self._graphs[key] = self._make_graph(key)
        except Exception as error:
            self._capture = None  # torch refuses a memory pool in which a recording has failed
            if is_out_of_memory(error):
                logger.warning("there is no memory to record a decode step of %d rows; it runs eagerly", key.num_rows)
                self._num_eager_steps[key] = -_NUM_STEPS_WITHOUT_MEMORY
            else:
                logger.exception(
                    "a decode step of %d rows could not be recorded; no more CUDA graphs are made", key.num_rows
                )
                self._has_failed = True
        self._sampled_ids.copy_(self._kept_ids)
        return key in self._graphs

    def _make_graph(self, key: GraphKey) -> _Graph:
        assert self._padding is not None
        inputs = torch.zeros((3, key.num_rows), dtype=torch.int64, device=self._device)
        inputs[2] = _NO_SOURCE
        parameters = torch.empty((0, key.num_rows), device=self._device)
        if key.sampling is not None:
            whole = self._sampler.parameters(self._padding.sampling, self._sizes[-1])  # padding may have more rows
            parameters = to_device(np.ascontiguousarray(whole[:, : key.num_rows]), self._device)
        caches = self._caches.begin(pad(self._padding, key.num_rows))

        def work() -> Tensor:
            token_ids, positions, sources = inputs.unbind(0)
            sampled_before = self._sampled_ids.index_select(0, sources.clamp(min=0))
            token_ids.copy_(torch.where(sources == _NO_SOURCE, token_ids, sampled_before))
            hidden_states = self._model.forward(token_ids, positions, caches)
            if key.sampling is not None:
                logits = self._model.compute_logits(hidden_states)
                self._sampled_ids[: key.num_rows].copy_(self._sampler.sample(logits, parameters, key.sampling))
            return hidden_states

        self._capture = self._capture or self._make_capture()
        replay, hidden_states = self._capture.record(work)
        return _Graph(inputs, parameters, replay, hidden_states)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows that batches are padded to: a few small ones, then every 16, and max_num_seqs last."""
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(48, max_num_seqs, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def pad(batch: Batch, num_rows: int) -> Batch:
    """Append requests of length 0, whose token has no slot, to a decode batch: num_rows requests in all.

    Sampled rows and placeholders stay as they are.
    """
    num_missing = num_rows - batch.num_requests

    def extended(array: Ints, value: int) -> Ints:
        return np.concatenate((array, np.full((num_missing, *array.shape[1:]), value, np.int64)))

    groups = tuple(
        GroupBatch(extended(g.slot_mapping, _PADDING_SLOT), extended(g.block_tables, 0), g.block_copies)
        for g in batch.groups
    )
    return dataclasses.replace(
        batch,
        token_ids=extended(batch.token_ids, 0),
        positions=extended(batch.positions, 0),
        query_start_locs=np.arange(num_rows + 1),
        seq_lens=extended(batch.seq_lens, 0),
        groups=groups,
    )


def _without_requests(batch: Batch) -> Batch:
    """A batch without its requests, to be padded; sampled rows and placeholders stay."""
    groups = tuple(GroupBatch(g.slot_mapping[:0], g.block_tables[:0], g.block_copies[:0]) for g in batch.groups)
    arrays = {name: getattr(batch, name)[:0] for name in ("token_ids", "positions", "seq_lens")}
    return dataclasses.replace(batch, groups=groups, **arrays)


def _inputs(batch: Batch, num_rows: int) -> Ints:
    """(3, num_rows): input ids, positions, and the row of the previous step whose id replaces the input id, or -1."""
    inputs = np.zeros((3, num_rows), np.int64)
    inputs[0, : batch.num_requests] = batch.token_ids
    inputs[1, : batch.num_requests] = batch.positions
    inputs[2] = _NO_SOURCE
    inputs[2, batch.placeholders.targets] = batch.placeholders.rows
    return inputs


def _is_decode(batch: Batch) -> bool:
    """Whether every request computes one token, samples it once and uses no adapter, which a graph would ignore."""
    is_plain_step = batch.scores is None and batch.adapters is None
    return is_plain_step and batch.num_tokens == batch.num_requests == len(batch.row_indices)
