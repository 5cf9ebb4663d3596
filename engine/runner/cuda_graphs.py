"""Runs steps as CUDA graphs: a step is recorded once, then queued again with one call.

A graph has a number of tokens, to which steps are padded, and there are two for a number. One computes a step in which
every request has one token, and samples it. The other computes any step: prompts beside decodes, drafts to verify, the
steps of a draft model; sampling follows it. If layers keep states, it also takes only steps of one token per request. A
graph reads and writes memory that never moves: input ids, positions, what the attention backend keeps
(`supports_graphs`), and the parameters of its rows if it samples. This module owns that memory, the graphs, and the ids
that the previous step sampled.

Nothing is recorded while requests run, since that takes as long as several steps. A step takes the smallest recorded
graph that holds it, or runs eagerly. Only CUDA needs this, but with another `Capture` the logic runs on any device.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.engine.batch import Batch, GraphKey, GroupBatch, Ints
from weft.engine.cache.specs import CacheSpec
from weft.engine.device import Capture, CudaCapture, fill, is_out_of_memory, mark, to_device
from weft.engine.kernels.torch.caches import Caches
from weft.engine.layers.block import Model
from weft.engine.runner.dummy_batch import dummy_batch
from weft.engine.sampling.sampler import GraphSampler, GreedySampler, is_plain

logger = logging.getLogger(__name__)

# Steps with more tokens run eagerly. By its arithmetic, an H100 computes a layer of an 8b model for some 300 tokens in
# the time in which the host launches it; then the device is the one that is waited for. Smaller models would gain from
# larger graphs. But such steps spread their launches over far more tokens than a decode step does, they are rare, and
# each size takes memory and time to record.
_MAX_NUM_TOKENS = 512

# A larger graph takes steps only that it pads by a quarter at most: there padding costs more than launches.
_MAX_PADDED_TOKENS = 256

# Steps before a size is recorded for which memory was missing.
_NUM_STEPS_WITHOUT_MEMORY = 1000

_NO_SOURCE = -1


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded step.

    Attributes:
        inputs: (3, num_tokens) int64, see `_inputs`.
        parameters: (n, num_tokens) float32, see `GraphSampler`; n is 0 if the graph does not sample.
        replay: Queues the step.
        hidden_states: (num_tokens, hidden_size) outputs.
        tapped: See `StepCaches`.
    """

    inputs: Tensor
    parameters: Tensor
    replay: Callable[[], None]
    hidden_states: Tensor
    tapped: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """The forward pass of a step, queued.

    Attributes:
        token_ids: (num_tokens,) input ids with placeholders filled in; from a graph valid until the next launch.
        hidden_states: Of the rows to be sampled or of all tokens, (n, hidden_size); valid as long.
        tapped: See `StepCaches`; valid as long.
        sampled_ids: (num_rows,) int64; None if the rows are still to be sampled.
        began: Marks the start of the step on the device; None on the CPU.
    """

    token_ids: Tensor
    hidden_states: Tensor
    tapped: Mapping[int, Tensor]
    sampled_ids: Tensor | None
    began: torch.cuda.Event | None


class StepGraphs:
    """Owns the graphs of one model and their memory. Used only by its runner."""

    def __init__(
        self,
        model: Model,
        caches: Caches,
        device: torch.device,
        specs: Sequence[CacheSpec],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        samples: bool = True,
        sampler: GraphSampler | None = None,
        make_capture: Callable[[], Capture] = CudaCapture,
    ) -> None:
        """Start with no graph.

        Args:
            specs: Of the model's cache groups.
            max_num_seqs: Most requests of a step.
            max_num_batched_tokens: Most tokens of a step.
            samples: Whether there are graphs that sample.
            sampler: Samples in graphs; None means graphs sample greedily only.
            make_capture: Makes the memory pool of the graphs, and a new one after `release`.
        """
        assert caches.supports_graphs
        self._model = model
        self._caches = caches
        self._device = device
        self._sampler = sampler or GreedySampler()
        self._make_capture = make_capture
        longest = max_num_seqs if caches.are_graphs_of_decodes else max_num_batched_tokens
        self._keys = graph_keys(max_num_seqs if samples else 0, longest)
        self._padding = _without_requests(dummy_batch(1, specs, 1, 1))
        self._sampled_ids = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=device)
        self._capture: Capture | None = None
        self._graphs: dict[GraphKey, _Graph] = {}
        self._num_steps = 0
        self._left_out: dict[GraphKey, int] = {}  # until so many steps have run
        self._has_failed = False

    @property
    def progress(self) -> tuple[int, int]:
        """How many graphs are recorded, and how many there may be."""
        return len(self._graphs), len(self._keys)

    def keep_sampled(self, token_ids: Tensor) -> None:
        """Keep ids that were sampled outside of a graph, for the placeholders of the next step."""
        self._sampled_ids[: len(token_ids)].copy_(token_ids)

    def run(self, batch: Batch, *, may_sample: bool, token_ids: Tensor | None = None) -> ComputedStep | None:
        """Queue a batch as a graph; returns None and queues nothing if it has to run eagerly.

        Args:
            may_sample: Whether the graph may sample, if its sampler can.
            token_ids: (num_tokens,) input ids on the device; None takes those of the batch, with its placeholders.
        """
        self._num_steps += 1
        key = self._find(batch, may_sample)
        if key is None:
            return None
        graph, num_tokens = self._graphs[key], batch.num_tokens
        self._caches.begin(dataclasses.replace(batch, graph=key))
        fill(graph.inputs, _inputs(batch, key.num_tokens, with_sources=token_ids is None))
        if token_ids is not None:
            graph.inputs[0, :num_tokens].copy_(token_ids)
        if graph.parameters.numel():
            fill(graph.parameters, self._sampler.parameters(batch.sampling, key.num_tokens))
        began = mark(self._device)
        graph.replay()
        sampled_ids = self._sampled_ids[:num_tokens].clone() if key.samples else None
        tapped = {depth: hidden[:num_tokens] for depth, hidden in graph.tapped.items()}
        return ComputedStep(graph.inputs[0, :num_tokens], graph.hidden_states[:num_tokens], tapped, sampled_ids, began)

    def record_next(self) -> bool:
        """Record one more graph while no step is in flight; returns whether there are more to record."""
        missing = self._missing()
        if missing:
            self._record(missing[0])
        return len(self._missing()) > 0

    def release(self) -> None:
        """Drop all graphs and so free their memory; they are recorded again when no request runs."""
        self._graphs.clear()
        self._capture = None

    def _find(self, batch: Batch, may_sample: bool) -> GraphKey | None:
        """The smallest recorded graph for a batch. Graphs keep no scores, pool nothing, see and adapt nothing."""
        if batch.scores is not None or batch.pooling is not None or batch.adapters is not None or batch.pictures:
            return None
        is_decode = batch.num_tokens == batch.num_requests
        if self._caches.are_graphs_of_decodes and not is_decode:
            return None
        can_sample = (
            may_sample
            and is_decode
            and len(batch.row_indices) == batch.num_tokens
            and is_plain(batch.sampling)
            and self._sampler.can_sample(batch.sampling)
        )
        largest = max(_MAX_PADDED_TOKENS, batch.num_tokens * 5 // 4)
        for samples in (True, False) if can_sample else (False,):
            kind = [key for key in self._graphs if key.samples == samples]
            fitting = [key for key in kind if batch.num_tokens <= key.num_tokens <= largest]
            if fitting:
                return min(fitting)
        return None

    def _missing(self) -> list[GraphKey]:
        """Graphs that may be recorded now, the most useful first."""
        if self._has_failed:
            return []
        return [k for k in self._keys if k not in self._graphs and self._left_out.get(k, 0) <= self._num_steps]

    def _record(self, key: GraphKey) -> None:
        """Record a step of padding, which touches no request.

        If this fails all graphs are released. Torch refuses a memory pool in which a recording has failed, and may
        clear the workspace of the stream that the older graphs were recorded on.
        """
        try:
            self._graphs[key] = self._make_graph(key)
            return
        except Exception as error:
            if is_out_of_memory(error):
                logger.warning("there is no memory to record a step of %d tokens; it runs eagerly", key.num_tokens)
                # The first graph may be too large by itself; after others, memory is used up.
                left_out = self._missing() if self._graphs else [key]
                self._left_out |= dict.fromkeys(left_out, self._num_steps + _NUM_STEPS_WITHOUT_MEMORY)
            else:
                named = "a step of %d tokens could not be recorded; no CUDA graphs are used"
                logger.exception(named, key.num_tokens)
                self._has_failed = True
        self.release()

    def _make_graph(self, key: GraphKey) -> _Graph:
        inputs = torch.zeros((3, key.num_tokens), dtype=torch.int64, device=self._device)
        inputs[2] = _NO_SOURCE
        parameters = torch.empty((0, key.num_tokens), device=self._device)
        if key.samples:
            greedy = self._sampler.parameters(self._padding.sampling, key.num_tokens)
            parameters = to_device(greedy, self._device)
        caches = self._caches.begin(dataclasses.replace(self._padding, graph=key))

        def work() -> Tensor:
            token_ids, positions, sources = inputs.unbind(0)
            sampled_before = self._sampled_ids.index_select(0, sources.clamp(min=0))
            token_ids.copy_(torch.where(sources == _NO_SOURCE, token_ids, sampled_before))
            hidden_states = self._model.forward(token_ids, positions, caches)
            if key.samples:
                logits = self._model.compute_logits(hidden_states)
                self._sampled_ids[: key.num_tokens].copy_(self._sampler.sample(logits, parameters))
            return hidden_states

        self._capture = self._capture or self._make_capture()
        replay, hidden_states = self._capture.record(work)
        return _Graph(inputs, parameters, replay, hidden_states, caches.tapped)


def graph_keys(max_num_sampled: int, max_num_batched_tokens: int) -> list[GraphKey]:
    """All graphs in the order of recording: first a few that hold any step, large ones first, then all others.

    Large ones come first because graphs share memory, and what small ones have taken may be too small for large ones.

    Args:
        max_num_sampled: Most requests of a step that a graph samples; 0 for none.
        max_num_batched_tokens: Most tokens of a step.
    """
    sampling = [GraphKey(size, True) for size in graph_sizes(max_num_sampled)]
    others = [GraphKey(size, False) for size in graph_sizes(min(max_num_batched_tokens, _MAX_NUM_TOKENS))]
    first = _halving(sampling) + _halving(others)
    return first + sorted({*sampling, *others} - {*first}, reverse=True)


def graph_sizes(limit: int) -> list[int]:
    """Numbers of tokens that steps are padded to: a few small ones, then every 16, later every 32, and limit last."""
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(48, 256, 16), *range(256, limit, 32)]
    return [size for size in sizes if size < limit] + [limit] * (limit > 0)


def _halving(keys: list[GraphKey]) -> list[GraphKey]:
    """The largest, then each half of the one before or a little more, so that a step is at most doubled by padding."""
    halving = keys[-1:]
    while halving and halving[-1].num_tokens > 1:
        half = halving[-1].num_tokens // 2
        halving.append(next(key for key in keys if key.num_tokens >= half))
    return halving


def _without_requests(batch: Batch) -> Batch:
    """A batch without its requests, all padding in a graph; sampled rows stay."""
    groups = tuple(GroupBatch(g.slot_mapping[:0], g.block_tables[:0], g.block_copies[:0]) for g in batch.groups)
    arrays = {name: getattr(batch, name)[:0] for name in ("token_ids", "positions", "seq_lens")}
    query_start_locs = batch.query_start_locs[:1]
    return dataclasses.replace(batch, groups=groups, query_start_locs=query_start_locs, table_rows=None, **arrays)


def _inputs(batch: Batch, num_tokens: int, *, with_sources: bool) -> Ints:
    """(3, num_tokens): input ids, positions, and the row of the previous step whose id replaces the input id, or -1."""
    inputs = np.zeros((3, num_tokens), np.int64)
    inputs[0, : batch.num_tokens] = batch.token_ids
    inputs[1, : batch.num_tokens] = batch.lookups
    inputs[2] = _NO_SOURCE
    if with_sources:
        inputs[2, batch.placeholders.targets] = batch.placeholders.rows
    return inputs
