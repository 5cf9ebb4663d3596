"""Weft's own attention on CUDA, in Triton: one launch for requests of few tokens, and one for all others.

The host plans what a step's programs do (`attention_plan`) and sends the plan in one copy from pinned memory. Nothing
here waits for the device. The layers that prepare the K/V of a step write them to the paged cache, and attention reads
them afterwards, in stream order. Both launches leave the parts of split contexts in one workspace, and one further
launch merges them.

CUDA graphs: a batch names the recorded step that computes it (`Batch.graph`). The launches of such a step, and the
addresses that they read, depend only on that name. So a graph that captured the `attend` calls of one batch computes
any later batch of the same name: call `begin` with the batch, which is not in the graph, then replay. Padding writes
nothing, reads nothing, and gets zeros. A step must run once before a capture, in which nothing can be compiled.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from weft.engine.batch import Batch, Ints
from weft.engine.cache.specs import CacheGroup, PagedGroups, PagedKV
from weft.engine.device import to_device
from weft.engine.kernels.triton import attention_jit as kernels
from weft.engine.kernels.triton import attention_tiles
from weft.engine.kernels.triton.attention_plan import Work, plan_work
from weft.engine.kernels.triton.attention_tiles import Tile, TileNames, padded
from weft.engine.kernels.triton.layers_jit import launch_options
from weft.engine.kernels.triton.prompts import PromptAttention, PromptStep, find_prompts, prompt_layers
from weft.engine.layers.block import AttentionBackend, AttentionStep, Heads, PagedCache

_LOG2_E = 1.4426950408889634

# Ask for fused multiply-adds: later versions of Triton turn them off by default.
_OPTIONS = {"enable_fp_fusion": True}

_NO_INTS = np.zeros(0, np.int64)
_NO_SLOT = -1

# Parts of a split context that are merged at a time.
_MERGED_PARTS = 16


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step for a KV group, on the host; the tunings are those of the launches."""

    prompts: PromptStep | None
    tunings: list[attention_tiles.LaunchTuning]
    work: Work


@dataclass(frozen=True, slots=True)
class _Launch:
    """Items of a launch, and what is merged after it, as views of the metadata of the step."""

    tile: Tile
    is_uniform: bool
    metadata: Tensor
    items: Tensor
    merges: Tensor


@dataclass(frozen=True, slots=True)
class _GroupStep:
    """A step as the layers of a KV group see it; the tensors are views of its metadata."""

    group: CacheGroup[PagedKV]
    slots: Tensor
    prompts: PromptStep | None
    prompt_starts: Tensor
    launches: list[_Launch]


class TritonBackend(AttentionBackend):
    """Owns the cache: per layer (num_blocks, 2, num_kv_heads, block_size, head_dim), with 2 for keys and values.

    Latents have 1 in the place of 2.
    """

    supports_graphs = True

    def __init__(
        self,
        groups: PagedGroups,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_heads: int,
        limits: attention_tiles.BatchLimits,
        cache_dtype: torch.dtype | None = None,
        is_deterministic: bool = False,
        is_dependent: bool = False,
        tiles: TileNames | None = None,
        prompts: PromptAttention | None = None,
        scales: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Allocate the cache and all memory that steps need; only the null block of the cache is written.

        Args:
            dtype: Of queries, keys, values and results.
            num_heads: Query heads of the layers whose specs name none.
            cache_dtype: Type of K/V in the cache; None means dtype.
            is_deterministic: The bits of a row must not depend on the rest of the batch. Then all steps have one tile
                and no context is split, which slows down prefill, and decoding at long contexts.
            is_dependent: See `dependent_launch`.
            tiles: The tiles of steps that are not deterministic, by names of `attention_tiles`; None means the first.
            prompts: Attends to the prompts that it takes; None leaves all to Weft's kernel.
            scales: By layer, (2, num_kv_heads) float32: in fp8, K and V of a head are divided by them. None is for 1.

        Raises:
            ValueError: There is no tile of such a name.
        """
        assert not (is_deterministic and prompts)
        self.name = f"triton and {prompts.name}" if prompts else "triton"
        self._groups = groups
        self._block_size = block_size
        self._device = device
        self._prompts = prompts
        self._layers = prompt_layers(groups, num_heads, dtype, cache_dtype or dtype, block_size, device)
        self._options = launch_options(is_dependent)
        self._caches: dict[int, Tensor] = {}
        for group in groups:
            shape = (num_blocks, group.spec.num_sides, group.spec.num_kv_heads, block_size, group.spec.head_dim)
            for layer in group.layers:
                self._caches[layer] = torch.empty(shape, dtype=cache_dtype or dtype, device=device)
                self._caches[layer][0].view(torch.uint8).zero_()
        tiles = tiles or TileNames()
        self._tunings = [
            attention_tiles.tune(group, num_heads, dtype, device, limits, tiles, is_deterministic) for group in groups
        ]
        num_integers = attention_tiles.most_integers(self._tunings, limits, block_size)
        self._metadata = torch.zeros(num_integers, dtype=torch.int32, device=device)
        num_rows = max((sum(launch.tiling.max_rows for launch in t.launches) for t in self._tunings), default=0)
        value_dim = max((group.spec.value_dim for group in groups), default=0)
        num_heads = max((group.spec.num_heads or num_heads for group in groups), default=0)
        self._partials = torch.empty((num_rows, num_heads, value_dim), dtype=torch.float32, device=device)
        self._partial_sums = torch.empty((num_rows, num_heads), dtype=torch.float32, device=device)
        self._unread = self._partial_sums  # in the place of slopes and sinks that a layer does not have
        self._scales = {
            layer: torch.ones(2, group.spec.num_kv_heads, device=device) for group in groups for layer in group.layers
        } | {layer: given.to(device) for layer, given in (scales or {}).items()}
        self._slopes = {
            g.spec: torch.tensor(g.spec.slopes, dtype=torch.float32, device=device) for g in groups if g.spec.slopes
        }

    @override
    def prepare(self) -> bool:
        return False

    @override
    def blocks(self, layer: int) -> tuple[Tensor, ...]:
        return (self._caches[layer],)

    @override
    def begin(self, batch: Batch) -> "TritonStep":
        plans: list[_Plan] = []
        for group, group_batch in zip(self._groups, batch.groups, strict=True):
            self._copy_blocks(group, group_batch.block_copies)
            plans.append(self._plan(batch, len(plans)))
        metadata, views = self._send(batch, plans)
        steps: dict[int, _GroupStep] = {}
        for group, plan in zip(self._groups, plans, strict=True):
            slots, starts, merges = next(views), next(views), next(views)
            launches = [_Launch(t.tile, t.is_uniform, metadata, next(views), merges[:0]) for t in plan.tunings]
            if launches:  # the last one merges for all
                launches[-1] = replace(launches[-1], merges=merges)
            if batch.is_mutual:
                group = replace(group, spec=group.spec.part(True, True))
            steps.update(dict.fromkeys(group.layers, _GroupStep(group, slots, plan.prompts, starts, launches)))
        return TritonStep(self, steps)

    def _begin_prompts(self, batch: Batch, index: int) -> PromptStep | None:
        """Offer the prompts of a step in a group to the library; a graph can hold none."""
        if self._prompts is None or batch.graph is not None or batch.is_mutual:
            return None
        prompts = find_prompts(batch, batch.groups[index])
        return self._prompts.begin(prompts, self._layers[index]) if prompts else None

    def _plan(self, batch: Batch, index: int) -> _Plan:
        """Choose the launches of a step in a group and what they compute.

        A graph that samples has one launch, since its requests have one token each. Any other graph has both.
        """
        tuning, prompts = self._tunings[index], self._begin_prompts(batch, index)
        are_short = np.ones(batch.num_requests, np.bool_)
        launches = [(tuning.short, are_short)]
        if tuning.others and not (batch.graph and batch.graph.samples):
            are_short = np.diff(batch.query_start_locs) <= (1 if prompts else tuning.short.tiling.tokens)
            launches = [(tuning.short, are_short), (tuning.others, ~are_short)][: 1 if prompts else 2]
        if batch.graph is None:
            launches = [(launch, takes_part) for launch, takes_part in launches if takes_part.any()]
        first_seen = self._groups[index].spec.first_seen
        work = plan_work(batch, first_seen, [(launch.tiling, takes_part) for launch, takes_part in launches])
        return _Plan(prompts, [launch for launch, _ in launches], work)

    def cache(self, layer: int, slots: Tensor) -> PagedCache:
        """Where a layer writes."""
        return PagedCache(self._caches[layer], slots, self._scales[layer])

    def attend(self, step: _GroupStep, layer: int, heads: Heads, sinks: Tensor | None) -> Tensor:
        """Attend, to prompts by the library if it took them; shapes as in `AttentionStep.attend`."""
        queries, keys, values = heads
        outputs = queries.new_empty(*queries.shape[:2], values.shape[2])
        if step.group.spec.latent_dim is not None:
            self._write_latents(step, layer, keys)
        if step.prompts:
            at, cache = step.prompts.tokens, self._caches[layer]
            attended = step.prompts.attend(queries[at], keys[at], values[at], cache, step.prompt_starts)
            if not step.launches:
                return attended
            outputs[at] = attended
        for launch in step.launches:
            self._attend_paged(step.group.spec, launch, layer, queries, outputs, sinks)
        return outputs

    def read(self, step: _GroupStep, layer: int, queries: Tensor) -> Tensor:
        """Attend to what is written."""
        outputs = torch.empty_like(queries)
        for launch in step.launches:
            self._attend_paged(step.group.spec, launch, layer, queries, outputs, None)
        return outputs

    def _attend_paged(
        self, spec: PagedKV, launch: _Launch, layer: int, queries: Tensor, outputs: Tensor, sinks: Tensor | None
    ) -> None:
        """Compute the items of a launch."""
        num_heads, head_dim = queries.shape[1:]
        assert queries.stride()[1:] == (head_dim, 1), "the heads of a token must be contiguous"
        if spec.latent_dim is None:
            self._attend_heads(spec, launch, layer, queries, outputs, sinks)
        else:
            self._attend_latents(spec, launch, layer, queries, outputs)
        if len(launch.merges):
            kernels.merge_kernel[(len(launch.merges) * num_heads,)](
                *(outputs, launch.merges, self._partials, self._partial_sums),
                self._unread if sinks is None else sinks,
                NUM_HEADS=num_heads,
                TILE_PARTS=_MERGED_PARTS,
                HEAD_DIM=spec.value_dim,
                HAS_SINKS=sinks is not None,
                PADDED_DIM=padded(spec.value_dim),
                **_OPTIONS,
                **self._options,
            )

    def _attend_heads(
        self, spec: PagedKV, launch: _Launch, layer: int, queries: Tensor, outputs: Tensor, sinks: Tensor | None
    ) -> None:
        tile, (num_heads, head_dim) = launch.tile, queries.shape[1:]
        kernels.attend_kernel[(len(launch.items) * spec.num_kv_heads,)](
            *(queries, outputs, self._caches[layer], launch.metadata, launch.items),
            *(self._partials, self._partial_sums, self._slopes.get(spec, self._unread)),
            self._unread if sinks is None else sinks,
            self._scales[layer],
            queries.stride(0),
            HAS_SINKS=sinks is not None,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded(head_dim),
            NUM_KV_HEADS=spec.num_kv_heads,
            BLOCK_SIZE=self._block_size,
            SCALE=spec.score_scale * _LOG2_E,
            SOFT_CAP=(spec.soft_cap or 0.0) * _LOG2_E,
            NUM_SHARED=num_heads // spec.num_kv_heads,
            WINDOW=spec.sliding_window or 0,
            SPAN=-1 if spec.sees_end else spec.span or 0,
            HAS_SLOPES=bool(spec.slopes),
            TILE_ROWS=tile.rows,
            TILE_KEYS=tile.keys,
            IS_UNIFORM=launch.is_uniform,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **_OPTIONS,
            **self._options,
        )

    def _attend_latents(self, spec: PagedKV, launch: _Launch, layer: int, queries: Tensor, outputs: Tensor) -> None:
        tile, num_heads, rotary_dim = launch.tile, queries.shape[1], spec.head_dim - spec.value_dim
        num_tiles = -(-num_heads // tile.rows)
        kernels.attend_latents_kernel[(len(launch.items) * num_tiles,)](
            *(queries, outputs, self._caches[layer], launch.metadata, launch.items),
            *(self._partials, self._partial_sums),
            queries.stride(0),
            SCALE=spec.score_scale * _LOG2_E,
            NUM_HEADS=num_heads,
            NUM_TILES=num_tiles,
            LATENT_DIM=spec.value_dim,
            ROTARY_DIM=rotary_dim,
            BLOCK_SIZE=self._block_size,
            PADDED_LATENT=padded(spec.value_dim),
            PADDED_ROTARY=padded(rotary_dim),
            TILE_ROWS=tile.rows,
            TILE_KEYS=tile.keys,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **_OPTIONS,
            **self._options,
        )

    def _write_latents(self, step: _GroupStep, layer: int, latents: Tensor) -> None:
        num_tokens, _, key_dim = latents.shape
        kernels.write_latents_kernel[(num_tokens,)](
            *(latents, self._caches[layer], step.slots, latents.stride(0)),
            KEY_DIM=key_dim,
            PADDED_DIM=padded(key_dim),
            **self._options,
        )

    def _send(self, batch: Batch, plans: list[_Plan]) -> tuple[Tensor, Iterator[Tensor]]:
        """Fill the metadata in one copy. A step beside another one has memory of its own for them.

        Returns them and views of them: per group slots, starts of prompts, merges, then the items of each launch.

        Arrays whose sizes a graph fixes come first, where it finds them again. Block tables, which are as wide as the
        longest request needs, come last; items hold their places.
        """
        num_padding = batch.graph.num_tokens - batch.num_tokens if batch.graph else 0
        arrays: list[Ints] = []
        for plan, group_batch in zip(plans, batch.groups, strict=True):
            slots = group_batch.slot_mapping
            if num_padding:
                slots = np.concatenate((slots, np.full(num_padding, _NO_SLOT)))
            arrays += [slots, plan.prompts.starts if plan.prompts else _NO_INTS, plan.work.merges, *plan.work.items]
        num_views = len(arrays)
        arrays += [group_batch.block_tables for group_batch in batch.groups]
        starts = np.cumsum([0, *(attention_tiles.aligned(array.size) for array in arrays)]).tolist()
        for plan, group_batch, start in zip(plans, batch.groups, starts[num_views:-1], strict=True):
            for items in plan.work.items:
                items[:, 0] = start + items[:, 0] * group_batch.block_tables.shape[1]
        num_integers = starts[-1]
        metadata = self._metadata.new_empty(num_integers) if batch.is_mutual else self._metadata
        assert num_integers <= len(metadata), "the batch exceeds the announced limits"
        # A new tensor for each step: the allocator of pinned memory reuses one only after it has been copied.
        host = torch.empty(num_integers, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        filled = host.numpy()
        for array, start in zip(arrays, starts, strict=False):
            filled[start : start + array.size] = array.ravel()
        metadata[:num_integers].copy_(host, non_blocking=True)
        return metadata, (
            metadata[start : start + array.size].view(array.shape)
            for array, start in zip(arrays[:num_views], starts, strict=False)
        )

    def _copy_blocks(self, group: CacheGroup[PagedKV], copies: Ints) -> None:
        if not len(copies):
            return
        sources, targets = to_device(copies, self._device).unbind(1)
        for layer in group.layers:
            blocks = self._caches[layer].flatten(1).view(torch.int64)  # plain bytes, for any type
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))


class TritonStep(AttentionStep):
    """Attention for one step."""

    def __init__(self, backend: TritonBackend, steps: dict[int, _GroupStep]) -> None:
        """Take the plan of each layer's group."""
        self._backend = backend
        self._steps = steps

    @override
    def cache(self, layer: int) -> PagedCache | None:
        step = self._steps[layer]
        return None if step.group.spec.latent_dim is not None else self._backend.cache(layer, step.slots)

    @override
    def attend(self, layer: int, heads: Heads, sinks: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        assert bias is None, "models with a bias are computed by torch's attention"
        return self._backend.attend(self._steps[layer], layer, heads, sinks)

    def read(self, layer: int, queries: Tensor) -> Tensor:
        """Attend to what is written."""
        return self._backend.read(self._steps[layer], layer, queries)
