"""Attention by torch, on the CPU and on CUDA: the reference in plain operations, and whole texts by the fused kernel.

The reference is one call for requests of about the same length. It is the formula to read and to compare with. It also
serves what no faster kernel of Weft's own serves: CUDA without Triton, and on a CPU float32, float16 and odd sizes of
blocks and heads. Keys and values of a layer are two tensors over flat slots. Only positions that some query sees are
gathered. So values that other requests left in a block, NaN included, never reach a result.

Whole texts are those of encoders, whose requests are computed in one step and whose keys and values no later step
reads: nothing is cached, and nothing is padded. There is one call for all texts of one length.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from weft.engine.batch import Batch, GroupBatch, Ints
from weft.engine.cache.specs import CacheSpec, PagedGroups, PagedKV
from weft.engine.layers.block import AttentionStep, Heads


@dataclass(frozen=True, slots=True)
class EqualTexts:
    """The texts of one length in a step.

    Attributes:
        tokens: (num_texts, length) indices of their tokens in the step.
        is_seen: (length, length) which tokens each token sees; None for all.
    """

    tokens: Tensor
    is_seen: Tensor | None


def equal_texts(batch: Batch, spec: PagedKV, device: torch.device) -> tuple[EqualTexts, ...] | None:
    """The texts of a step by length; None if a request is not whole, or its tokens see others in another way."""
    starts, lengths = batch.query_start_locs[:-1], np.diff(batch.query_start_locs)
    if not spec.is_bidirectional or spec.slopes or spec.has_sinks or spec.latent_dim is not None:
        return None
    if not np.array_equal(lengths, batch.seq_lens):
        return None
    return texts_by_length(starts, lengths, spec.sliding_window, device)


def texts_by_length(starts: Ints, lengths: Ints, window: int | None, device: torch.device) -> tuple[EqualTexts, ...]:
    """Texts whose tokens begin at these indices of a step, and see window - 1 tokens on both sides, or all."""
    texts = []
    for length in np.unique(lengths).tolist():
        tokens = torch.from_numpy(starts[lengths == length][:, None] + np.arange(length))
        is_seen = None
        if window is not None and window < length:
            places = torch.arange(length)
            is_seen = ((places[:, None] - places).abs() < window).to(device, non_blocking=True)
        texts.append(EqualTexts(tokens.to(device, non_blocking=True), is_seen))
    return tuple(texts)


def attend_to_texts(spec: PagedKV, texts: tuple[EqualTexts, ...], heads: Heads, bias: Tensor | None = None) -> Tensor:
    """Attend among the tokens of each text; shapes as in `AttentionStep.attend`."""
    if len(texts) == 1:  # all tokens, in their order
        shape = texts[0].tokens.shape
        parts = [part.view(*shape, *part.shape[1:]) for part in heads]
        return _attend_equal(spec, parts, texts[0].is_seen, bias).flatten(0, 1)
    queries, _, values = heads
    attended = queries.new_empty(*queries.shape[:2], values.shape[2])
    for each in texts:
        parts = [part[each.tokens] for part in heads]
        attended[each.tokens] = _attend_equal(spec, parts, each.is_seen, bias)
    return attended


def _attend_equal(spec: PagedKV, heads: list[Tensor], is_seen: Tensor | None, bias: Tensor | None) -> Tensor:
    """Queries, keys and values (num_texts, length, their heads, head_dim) -> as the queries."""
    if spec.soft_cap is not None:
        return _attend_capped(spec, heads, is_seen)
    queries, keys, values = (part.transpose(1, 2) for part in heads)
    if bias is not None:
        places = torch.arange(queries.shape[2], device=bias.device)
        biases = _at_distances(bias, places - places[:, None]).to(queries.dtype)
        is_seen = biases if is_seen is None else biases.masked_fill(~is_seen, float("-inf"))
    has_groups = queries.shape[1] != keys.shape[1]
    attended = F.scaled_dot_product_attention(queries, keys, values, is_seen, scale=spec.scale, enable_gqa=has_groups)
    return attended.transpose(1, 2)


def _attend_capped(spec: PagedKV, heads: list[Tensor], is_seen: Tensor | None) -> Tensor:
    """`_attend_equal` by the formula, since the fused kernel knows no soft cap."""
    queries, keys, values = heads
    num_texts, length = queries.shape[:2]
    if is_seen is None:
        is_seen = torch.ones(1, 1, dtype=torch.bool, device=queries.device).expand(length, length)
    attended, num_queries = torch.empty_like(queries), max(1, _SCORES_AT_ONCE // (num_texts * length))
    for first in range(0, length, num_queries):
        part = slice(first, first + num_queries)
        attended[:, part] = attend(queries[:, part], keys, values, is_seen[None, part], spec)
    return attended


def _at_distances(bias: Tensor, distances: Tensor) -> Tensor:
    """(num_heads, *shape of distances): what `AttentionStep.attend` adds to scores of keys so far from their query."""
    middle = bias.shape[1] // 2
    return bias[:, (middle + distances).clamp(0, bias.shape[1] - 1)]


@dataclass(frozen=True, slots=True)
class TextsStep(AttentionStep):
    """Attention of an encoder, among the tokens of each text; nothing is kept.

    Attributes:
        starts, lengths: See `texts_by_length`.
        specs: What differs between its layers.
    """

    starts: Ints
    lengths: Ints
    device: torch.device
    specs: tuple[CacheSpec, ...]
    texts: dict[int, tuple[EqualTexts, ...]] = field(default_factory=dict)

    @override
    def cache(self, layer: int) -> None:
        return None

    @override
    def attend(self, layer: int, heads: Heads, sinks: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        spec = self.specs[layer]
        assert isinstance(spec, PagedKV)
        if layer not in self.texts:
            self.texts[layer] = texts_by_length(self.starts, self.lengths, spec.sliding_window, self.device)
        return attend_to_texts(spec, self.texts[layer], heads, bias)


_QUERIES_AT_ONCE = 256
"""Most tokens of a request whose scores exist at the same time."""
_FAR = 1 << 40
_SCORES_AT_ONCE = 1 << 20
"""Most scores of a head at the same time: behind a long context there are fewer tokens."""


class _Run(NamedTuple):
    """Tokens [start, stop) of the step, all of one request; positions and the cache slots that any of them sees."""

    start: int
    stop: int
    positions: Ints
    seen: Ints
    slots: Ints


@dataclass(frozen=True, slots=True)
class _Part:
    """Runs of as many tokens each. What runs see is padded to the most that one sees, with slot 0, which nobody sees.

    Attributes:
        tokens: (num_runs, num_queries) indices of their tokens in the step.
        slots: (num_runs, num_seen) cache slots of the positions that any token of a run sees.
        is_seen: (num_runs, num_queries, num_seen) which of these positions each token sees.
        distances: As is_seen, these positions minus those of the tokens; None if they do not matter.
    """

    tokens: Tensor
    slots: Tensor
    is_seen: Tensor
    distances: Tensor | None


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """What all layers of a cache group share in a step."""

    spec: PagedKV
    slot_mapping: Tensor
    parts: tuple[_Part, ...]
    texts: tuple[EqualTexts, ...] | None
    """Whole texts, which need no cache and have no parts; None for any other step."""


class SdpaBackend:
    """Owns the cache of every layer: keys and values, each (num_blocks * block_size, num_kv_heads, head_dim).

    The values of latents are a view of the keys.
    """

    name = "sdpa"
    supports_graphs = False

    def __init__(
        self, groups: PagedGroups, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the cache. Only the null block is written, with zeros for ever. The rest takes no memory yet."""
        self._groups = groups
        self._block_size = block_size
        self._device = device
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        for group in groups:
            shape = (num_blocks * block_size, group.spec.num_kv_heads, group.spec.head_dim)
            for layer in group.layers:
                for caches in (self._keys, self._values)[: group.spec.num_sides]:
                    caches[layer] = torch.empty(shape, dtype=dtype, device=device)
                    caches[layer][:block_size] = 0
                self._values.setdefault(layer, self._keys[layer][..., : group.spec.value_dim])

    def prepare(self) -> bool:
        """Prepare nothing: the cache takes memory as it is written."""
        return False

    def blocks(self, layer: int) -> list[Tensor]:
        """See `AttentionBackend`; the values of latents are a part of the keys."""
        caches = [cache for cache in (self._keys[layer], self._values[layer]) if cache.is_contiguous()]
        return [cache.view(-1, self._block_size, *cache.shape[1:]) for cache in caches]

    def begin(self, batch: Batch) -> "SdpaStep":
        """Copy the blocks that the batch asks for, and plan the step."""
        plans: dict[int, _GroupPlan] = {}
        for group, group_batch in zip(self._groups, batch.groups, strict=True):
            for layer in group.layers if len(group_batch.block_copies) else ():
                for cache in (self._keys[layer], self._values[layer])[: group.spec.num_sides]:
                    self._copy_blocks(cache, group_batch.block_copies)
            spec = group.spec.part(batch.inputs is not None, batch.is_mutual)
            texts = equal_texts(batch, spec, self._device)
            parts = tuple(self._parts(batch, group_batch, spec)) if texts is None else ()
            plan = _GroupPlan(spec, self._to_device(group_batch.slot_mapping), parts, texts)
            plans.update(dict.fromkeys(group.layers, plan))
        return SdpaStep(self._keys, self._values, plans)

    def _copy_blocks(self, cache: Tensor, copies: Ints) -> None:
        """Copy once: a block may be the source of one copy and the target of another."""
        sources, targets = self._to_device(copies).unbind(1)
        blocks = cache.view(-1, self._block_size, *cache.shape[1:])
        blocks[targets] = blocks[sources]

    def _parts(self, batch: Batch, group: GroupBatch, spec: PagedKV) -> Iterator[_Part]:
        alike: dict[tuple[int, int], list[_Run]] = {}
        for run in self._runs(batch, group, spec):  # padding takes at most as much as what is seen
            alike.setdefault((run.stop - run.start, len(run.seen).bit_length()), []).append(run)
        for (num_queries, _), runs in alike.items():
            num_runs = max(1, _SCORES_AT_ONCE // (num_queries * max(len(run.seen) for run in runs)))
            for first in range(0, len(runs), num_runs):
                yield self._part(runs[first : first + num_runs], spec)

    def _runs(self, batch: Batch, group: GroupBatch, spec: PagedKV) -> Iterator[_Run]:
        for request, seq_len in enumerate(batch.seq_lens.tolist()):
            first, end = batch.query_start_locs[request : request + 2].tolist()
            num_queries = max(1, min(_QUERIES_AT_ONCE, _SCORES_AT_ONCE // seq_len))
            for start in range(first, end, num_queries):
                stop = min(start + num_queries, end)
                positions = np.arange(start, stop) + (seq_len - end)
                seen = np.arange(spec.first_seen(positions)[0], min(positions[-1] + 1 + spec.num_ahead, seq_len))
                blocks, offsets = np.divmod(seen, self._block_size)
                slots = group.block_tables[request, blocks] * self._block_size + offsets
                yield _Run(start, stop, positions, seen, slots)

    def _part(self, runs: list[_Run], spec: PagedKV) -> _Part:
        num_seen = max(len(run.seen) for run in runs)
        slots, seen = np.zeros((2, len(runs), 1, num_seen), np.int64)
        seen -= _FAR  # before any token
        for index, run in enumerate(runs):
            slots[index, 0, : len(run.seen)], seen[index, 0, : len(run.seen)] = run.slots, run.seen
        positions = np.stack([run.positions for run in runs])[..., None]  # (num_runs, num_queries, 1)
        is_seen = (seen <= positions + spec.num_ahead) & (seen >= spec.first_seen(positions))
        return _Part(
            self._to_device(np.stack([np.arange(run.start, run.stop) for run in runs])),
            self._to_device(slots[:, 0]),
            self._to_device(is_seen),
            self._to_device(seen - positions) if spec.slopes or spec.has_bias else None,
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class SdpaStep:
    """Attention for one step; see `AttentionStep`."""

    def __init__(self, keys: dict[int, Tensor], values: dict[int, Tensor], plans: dict[int, _GroupPlan]) -> None:
        """Attend in the caches of each layer by its plan."""
        self._keys = keys
        self._values = values
        self._plans = plans

    def cache(self, layer: int) -> None:
        """Do nothing: `attend` writes K/V."""

    def attend(self, layer: int, heads: Heads, sinks: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Write K/V, then attend; shapes as in `AttentionStep.attend`."""
        plan = self._plans[layer]
        if plan.texts is not None:
            return attend_to_texts(plan.spec, plan.texts, heads)
        queries, keys, values = heads
        self.write(layer, keys, values)
        return self.read(layer, queries, sinks, bias)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write K/V of the step's tokens."""
        for cached, new in ((self._keys[layer], keys), (self._values[layer], values)):
            cached.index_copy_(0, self._plans[layer].slot_mapping, new)

    def read(self, layer: int, queries: Tensor, sinks: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Attend to what is written."""
        plan, cached_keys, cached_values = self._plans[layer], self._keys[layer], self._values[layer]
        attended = queries.new_empty(*queries.shape[:2], cached_values.shape[2])
        for part in plan.parts:
            seen = cached_keys[part.slots], cached_values[part.slots]
            results = attend(queries[part.tokens], *seen, part.is_seen, plan.spec, part.distances, sinks, bias)
            attended[part.tokens] = results.to(attended.dtype)
        return attended


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    is_seen: Tensor,
    spec: PagedKV,
    distances: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(soft cap(scale * queries . keys)) . values, in float32. Vaswani et al., 2017; Ainslie et al., 2023.

    Args:
        queries: (r, q, num_heads, head_dim), of r runs.
        keys, values: (r, k, num_kv_heads, head_dim or value_dim), each for num_heads / num_kv_heads neighbouring heads.
        is_seen: (r, q, k).
        distances: (r, q, k) positions of keys minus those of queries, which slopes and bias need.
        sinks: (num_heads,) logits of a further position with a value of zeros; None for none.
        bias: See `AttentionStep.attend`.

    Returns:
        (r, q, num_heads, value_dim), float32.
    """
    num_runs, num_queries = queries.shape[:2]
    num_keys, num_kv_heads, head_dim = keys.shape[1:]
    grouped = queries.float().view(num_runs, num_queries, num_kv_heads, -1, head_dim)
    scores = torch.einsum("rqhsd,rkhd->rhsqk", grouped, keys.float()) * spec.score_scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    num_shared = scores.shape[2]
    if distances is not None and spec.slopes:
        slopes = torch.tensor(spec.slopes, device=scores.device).view(num_kv_heads, num_shared, 1, 1)
        scores += slopes * distances[:, None, None]
    if distances is not None and bias is not None:
        scores += _at_distances(bias, distances).view(num_kv_heads, num_shared, *distances.shape).movedim(2, 0)
    scores.masked_fill_(~is_seen[:, None, None], float("-inf"))
    if sinks is not None:
        sunk = sinks.view(num_kv_heads, num_shared, 1, 1).expand(num_runs, -1, -1, num_queries, 1)
        scores = torch.cat((scores, sunk), -1)
    weights = scores.softmax(-1)[..., :num_keys]
    return torch.einsum("rhsqk,rkhd->rqhsd", weights, values.float()).flatten(2, 3)
