"""Weft's own attention on CUDA, in Triton: over a paged KV cache, one launch for all decodes, one for all prompts.

What a step's programs do is planned on the host (`triton_plan`) and sent in one copy from pinned memory; nothing here
waits for the device. The K/V of a step are written by the layers that prepare them, then attended to, in the order of
the stream.

For CUDA graphs: a *decode* batch, in which every request has one token, may be padded with requests of one token,
sequence length 0, slot -1 in every group, and any block table. They write nothing, read nothing, and get zeros. Of a
decode batch the launches, and the addresses that they read, depend on its number of requests alone. So a graph that
captured the `attend` calls of a step (`begin` stays outside) computes any later decode batch of as many requests: call
`begin` with it, then replay. A decode step must have run once outside of a capture, in which nothing can be compiled.
"""

from dataclasses import dataclass

import numpy as np
import torch

from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.triton.attention_kernels import attend_kernel, merge_kernel
from weft.engine.kernels.triton.attention_plan import Work, plan_work
from weft.engine.kernels.triton.attention_tiles import Tile, padded
from weft.engine.kernels.triton.attention_tuning import BatchLimits, GroupTuning, aligned, most_integers, tune
from weft.engine.kernels.triton.flash import FreshAttention, FreshPrompts, find_fresh_prompts
from weft.engine.layers.attention import PagedCache
from weft.engine.step.batch import Batch, Ints
from weft.engine.step.transfer import to_device

_LOG2_E = 1.4426950408889634

_OPTIONS = {"enable_fp_fusion": True}
"""Fused multiply-adds, which Triton is about to turn off for those who do not ask for them."""

_NO_INTS = np.zeros(0, np.int64)

_MERGED_PARTS = 16
"""Parts of a split context that are merged at a time."""


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """What a KV group does in a step, on the host: who attends in prompts, and see `TritonBackend._plan`."""

    fresh: FreshPrompts | None
    works: list[tuple[Tile, bool, Work]]


@dataclass(frozen=True, slots=True)
class _Launch:
    """Requests of a step that are computed in tiles of one size; the tensors are views of the backend's metadata."""

    tile: Tile
    is_uniform: bool
    items: torch.Tensor
    merges: torch.Tensor


@dataclass(frozen=True, slots=True)
class _GroupStep:
    """A step as the layers of a KV group see it; the tensors are views of the backend's metadata."""

    group: CacheGroup[PagedKV]
    slots: torch.Tensor
    fresh: FreshPrompts | None
    fresh_starts: torch.Tensor
    launches: list[_Launch]


class TritonBackend:
    """Owns the cache: per layer (num_blocks, 2, num_kv_heads, block_size, head_dim), with 2 for keys and values."""

    supports_graphs = True

    def __init__(
        self,
        groups: tuple[CacheGroup[PagedKV], ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_heads: int,
        limits: BatchLimits,
        cache_dtype: torch.dtype | None = None,
        is_deterministic: bool = False,
        fresh: FreshAttention | None = None,
    ) -> None:
        """Allocate the cache and all memory that steps need; of the cache only the null block is touched.

        Args:
            dtype: Of queries, keys, values and results.
            num_heads: Query heads of every layer.
            cache_dtype: What K/V are kept in; None means dtype. float8_e4m3fn is converted to and from it unscaled.
            is_deterministic: Whether the bits of a row must not depend on the rest of the batch: one tile for all steps
                and no splits, which slows down prefill, and decoding at long contexts.
            fresh: Attends in place of Weft's kernel where `find_fresh_prompts` finds some.
        """
        self.name = "triton and flash" if fresh else "triton"
        self._groups = groups
        self._block_size = block_size
        self._device = device
        self._num_heads = num_heads
        self._is_deterministic = is_deterministic
        self._fresh = fresh
        self._caches: dict[int, torch.Tensor] = {}
        for group in groups:
            shape = (num_blocks, 2, group.spec.num_kv_heads, block_size, group.spec.head_dim)
            for layer in group.layers:
                self._caches[layer] = torch.empty(shape, dtype=cache_dtype or dtype, device=device)
                self._caches[layer][0].view(torch.uint8).zero_()
        self._tunings = [tune(group, num_heads, dtype, device, limits, is_deterministic) for group in groups]
        num_integers = most_integers(self._tunings, limits, block_size)
        self._metadata = torch.zeros(num_integers, dtype=torch.int32, device=device)
        num_rows = max((t.splitting.max_rows for t in self._tunings if t.splitting), default=0)
        head_dim = max((group.spec.head_dim for group in groups), default=0)
        self._partials = torch.empty((num_rows, num_heads, head_dim), dtype=torch.float32, device=device)
        self._partial_sums = torch.empty((num_rows, num_heads), dtype=torch.float32, device=device)

    def prepare(self) -> bool:
        """Nothing to do: the whole cache has its memory."""
        return False

    def begin(self, batch: Batch) -> "TritonStep":
        """Copy the blocks that the batch asks for, and put the items of the step into device memory."""
        plans: list[_GroupPlan] = []
        for group, group_batch, tuning in zip(self._groups, batch.groups, self._tunings, strict=True):
            self._copy_blocks(group, group_batch.block_copies)
            fresh = find_fresh_prompts(batch, group.spec.sliding_window) if self._fresh else None
            plans.append(_GroupPlan(fresh, self._plan(batch, group.spec, tuning, fresh is not None)))
        views = iter(self._send(batch, plans))
        steps: dict[int, _GroupStep] = {}
        for group, plan in zip(self._groups, plans, strict=True):
            slots, starts = next(views), next(views)
            launches = [_Launch(tile, uniform, next(views), next(views)) for tile, uniform, _ in plan.works]
            steps.update(dict.fromkeys(group.layers, _GroupStep(group, slots, plan.fresh, starts, launches)))
        return TritonStep(self, steps)

    def _plan(
        self, batch: Batch, spec: PagedKV, tuning: GroupTuning, skips_prompts: bool
    ) -> list[tuple[Tile, bool, Work]]:
        """Tile, whether it is uniform, and what is computed in such tiles: one-token requests, then the others."""
        are_prompts = np.diff(batch.query_start_locs) > 1
        parts = [(tuning.decode_tile, True, ~are_prompts), (tuning.tile, False, are_prompts)]
        if self._is_deterministic:
            parts = [(tuning.tile, True, np.ones_like(are_prompts))]
        works: list[tuple[Tile, bool, Work]] = []
        for tile, is_uniform, takes_part in parts[: 1 if skips_prompts else 2]:
            if takes_part.any():
                tile_tokens = tile.rows * spec.num_kv_heads // self._num_heads
                sizes = {"tile_tokens": tile_tokens, "tile_keys": tile.keys}
                work = plan_work(batch, spec.sliding_window, **sizes, splitting=tuning.splitting, takes_part=takes_part)
                works.append((tile, is_uniform, work))
        return works

    def cache(self, layer: int) -> torch.Tensor:
        """Blocks of a layer."""
        return self._caches[layer]

    def attend(
        self, step: _GroupStep, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attend to what is in the cache or, where prompts are fresh, to the step's own K/V; shapes as in the step."""
        outputs = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if self._fresh and step.fresh:
            at = step.fresh.tokens
            attended = self._fresh(queries[at], keys[at], values[at], step.fresh_starts, step.fresh.longest)
            if not step.launches:
                return attended
            outputs[at] = attended
        for launch in step.launches:
            self._attend_paged(step.group.spec, launch, layer, queries, outputs)
        return outputs

    def _attend_paged(
        self, spec: PagedKV, launch: _Launch, layer: int, queries: torch.Tensor, outputs: torch.Tensor
    ) -> None:
        """Compute the items of a launch."""
        cache, tile = self._caches[layer], launch.tile
        num_heads, head_dim = queries.shape[1:]
        assert queries.stride()[1:] == (head_dim, 1), "heads lie together"
        sizes = {"HEAD_DIM": head_dim, "PADDED_DIM": padded(head_dim)}
        cached = {"NUM_KV_HEADS": spec.num_kv_heads, "BLOCK_SIZE": self._block_size, **sizes}
        attend_kernel[(len(launch.items) * spec.num_kv_heads,)](
            *(queries, outputs, cache, self._metadata, launch.items, self._partials, self._partial_sums),
            queries.stride(0),
            SCALE=spec.score_scale * _LOG2_E,
            SOFT_CAP=(spec.soft_cap or 0.0) * _LOG2_E,
            NUM_SHARED=num_heads // spec.num_kv_heads,
            WINDOW=spec.sliding_window or 0,
            TILE_ROWS=tile.rows,
            TILE_KEYS=tile.keys,
            IS_UNIFORM=launch.is_uniform,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **cached,
            **_OPTIONS,
        )
        if len(launch.merges):
            merge_kernel[(len(launch.merges) * num_heads,)](
                *(outputs, launch.merges, self._partials, self._partial_sums),
                NUM_HEADS=num_heads,
                TILE_PARTS=_MERGED_PARTS,
                **sizes,
                **_OPTIONS,
            )

    def _send(self, batch: Batch, plans: list[_GroupPlan]) -> list[torch.Tensor]:
        """Fill the metadata in one copy.

        Returns views, group by group, of slots and starts of prompts and, launch by launch, items and merges.

        What has a size that the numbers of requests and tokens decide lies in front, where a graph finds it again; the
        block tables, as wide as the longest request needs, lie behind, and items say where.
        """
        arrays: list[Ints] = []
        for plan, group_batch in zip(plans, batch.groups, strict=True):
            arrays += [group_batch.slot_mapping, plan.fresh.starts if plan.fresh else _NO_INTS]
            arrays += [array for *_, work in plan.works for array in (work.items, work.merges)]
        num_views = len(arrays)
        arrays += [group_batch.block_tables for group_batch in batch.groups]
        starts = np.cumsum([0, *(aligned(array.size) for array in arrays)]).tolist()
        for plan, group_batch, start in zip(plans, batch.groups, starts[num_views:-1], strict=True):
            for *_, work in plan.works:
                work.items[:, 0] = start + work.items[:, 0] * group_batch.block_tables.shape[1]
        num_integers = starts[-1]
        assert num_integers <= len(self._metadata), "a batch stays within the limits that it was announced with"
        # A fresh tensor for each step: the allocator of pinned memory reuses one only once it has been copied.
        host = torch.empty(num_integers, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        filled = host.numpy()
        for array, start in zip(arrays, starts, strict=False):
            filled[start : start + array.size] = array.ravel()
        self._metadata[:num_integers].copy_(host, non_blocking=True)
        return [
            self._metadata[start : start + array.size].view(array.shape)
            for array, start in zip(arrays[:num_views], starts, strict=False)
        ]

    def _copy_blocks(self, group: CacheGroup[PagedKV], copies: Ints) -> None:
        if not len(copies):
            return
        sources, targets = to_device(copies, self._device).unbind(1)
        for layer in group.layers:
            blocks = self._caches[layer].flatten(1).view(torch.int64)  # as bytes, whatever the type
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))


class TritonStep:
    """Attention for one step; see `AttentionStep`."""

    def __init__(self, backend: TritonBackend, steps: dict[int, _GroupStep]) -> None:
        """Attend by what each layer's group was planned to do."""
        self._backend = backend
        self._steps = steps

    def cache(self, layer: int) -> PagedCache:
        """See `AttentionStep.cache`; layers write."""
        return PagedCache(self._backend.cache(layer), self._steps[layer].slots)

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        return self._backend.attend(self._steps[layer], layer, queries, keys, values)
