"""Weft's own attention on CUDA, in Triton: one launch for all decodes and one for all prompts.

The host plans what a step's programs do (`attention_plan`) and sends the plan in one copy from pinned memory. Nothing
here waits for the device. The layers that prepare the K/V of a step write them to the paged cache, and attention reads
them afterwards, in stream order.

CUDA graphs: in a decode batch every request has one token. It may be padded with requests of one token, sequence length
0, slot -1 in every group, and any block table. Padding writes nothing, reads nothing, and gets zeros. The launches of a
decode batch, and the addresses that they read, depend only on its number of requests. So a graph that captured the
`attend` calls of a step computes any later decode batch of that size: call `begin` with the batch, which is not in the
graph, then replay. A decode step must run once before a capture, in which nothing can be compiled.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import override

from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.kernels.triton.attention_kernels import attend_kernel, merge_kernel
from weft.engine.kernels.triton.attention_plan import Work, plan_work
from weft.engine.kernels.triton.attention_tiles import Tile, TileNames, padded
from weft.engine.kernels.triton.attention_tuning import BatchLimits, GroupTuning, aligned, most_integers, tune
from weft.engine.kernels.triton.prompt_attention import PromptAttention, PromptStep, find_prompts, prompt_layers
from weft.engine.layers.attention import AttentionBackend, AttentionStep, PagedCache
from weft.engine.step.batch import Batch, Ints
from weft.engine.step.transfer import to_device

_LOG2_E = 1.4426950408889634

# Ask for fused multiply-adds: later versions of Triton turn them off by default.
_OPTIONS = {"enable_fp_fusion": True}

_NO_INTS = np.zeros(0, np.int64)

# Parts of a split context that are merged at a time.
_MERGED_PARTS = 16


@dataclass(frozen=True, slots=True)
class _PlannedLaunch:
    """Requests of a step that are computed in tiles of one size, on the host; see IS_UNIFORM of `attend_kernel`."""

    tile: Tile
    is_uniform: bool
    work: Work


@dataclass(frozen=True, slots=True)
class _Launch:
    """The same with `Work` on the device, as views of the backend's metadata."""

    tile: Tile
    is_uniform: bool
    items: torch.Tensor
    merges: torch.Tensor


@dataclass(frozen=True, slots=True)
class _GroupStep:
    """A step as the layers of a KV group see it; the tensors are views of the backend's metadata."""

    group: CacheGroup[PagedKV]
    slots: torch.Tensor
    prompts: PromptStep | None
    prompt_starts: torch.Tensor
    launches: list[_Launch]


class TritonBackend(AttentionBackend):
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
        tiles: TileNames | None = None,
        prompts: PromptAttention | None = None,
    ) -> None:
        """Allocate the cache and all memory that steps need; only the null block of the cache is written.

        Args:
            dtype: Of queries, keys, values and results.
            num_heads: Query heads of every layer.
            cache_dtype: Type of K/V in the cache; None means dtype. Conversion to float8_e4m3fn has no scale.
            is_deterministic: The bits of a row must not depend on the rest of the batch. Then all steps have one tile
                and no context is split, which slows down prefill, and decoding at long contexts.
            tiles: The tiles of steps that are not deterministic, by names of `attention_tiles`; None means the first.
            prompts: Attends to the prompts that it takes; None leaves all to Weft's kernel.

        Raises:
            ValueError: There is no tile of such a name.
        """
        assert not (is_deterministic and prompts)
        self.name = f"triton and {prompts.name}" if prompts else "triton"
        self._groups = groups
        self._block_size = block_size
        self._device = device
        self._num_heads = num_heads
        self._is_deterministic = is_deterministic
        self._prompts = prompts
        self._layers = prompt_layers(groups, num_heads, dtype, cache_dtype or dtype, block_size, device)
        self._caches: dict[int, torch.Tensor] = {}
        for group in groups:
            shape = (num_blocks, 2, group.spec.num_kv_heads, block_size, group.spec.head_dim)
            for layer in group.layers:
                self._caches[layer] = torch.empty(shape, dtype=cache_dtype or dtype, device=device)
                self._caches[layer][0].view(torch.uint8).zero_()
        tiles = tiles or TileNames()
        self._tunings = [tune(group, num_heads, dtype, device, limits, tiles, is_deterministic) for group in groups]
        num_integers = most_integers(self._tunings, limits, block_size)
        self._metadata = torch.zeros(num_integers, dtype=torch.int32, device=device)
        num_rows = max((t.splitting.max_rows for t in self._tunings if t.splitting), default=0)
        head_dim = max((group.spec.head_dim for group in groups), default=0)
        self._partials = torch.empty((num_rows, num_heads, head_dim), dtype=torch.float32, device=device)
        self._partial_sums = torch.empty((num_rows, num_heads), dtype=torch.float32, device=device)

    @override
    def prepare(self) -> bool:
        return False

    @override
    def begin(self, batch: Batch) -> "TritonStep":
        taken: list[PromptStep | None] = []
        plans: list[list[_PlannedLaunch]] = []
        for group, group_batch, tuning in zip(self._groups, batch.groups, self._tunings, strict=True):
            self._copy_blocks(group, group_batch.block_copies)
            taken.append(self._begin_prompts(batch, len(taken)))
            plans.append(self._plan(batch, group.spec, tuning, skips_prompts=taken[-1] is not None))
        views = self._send(batch, taken, plans)
        steps: dict[int, _GroupStep] = {}
        for group, prompts, plan in zip(self._groups, taken, plans, strict=True):
            slots, starts = next(views), next(views)
            launches = [_Launch(p.tile, p.is_uniform, next(views), next(views)) for p in plan]
            steps.update(dict.fromkeys(group.layers, _GroupStep(group, slots, prompts, starts, launches)))
        return TritonStep(self, steps)

    def _begin_prompts(self, batch: Batch, index: int) -> PromptStep | None:
        """Offer the prompts of a step in a group to the library."""
        prompts = find_prompts(batch, batch.groups[index]) if self._prompts else None
        return self._prompts.begin(prompts, self._layers[index]) if self._prompts and prompts else None

    def _plan(self, batch: Batch, spec: PagedKV, tuning: GroupTuning, *, skips_prompts: bool) -> list[_PlannedLaunch]:
        """One launch for one-token requests, then one for the others."""
        are_prompts = np.diff(batch.query_start_locs) > 1
        parts = [(tuning.decode_tile, True, ~are_prompts), (tuning.tile, False, are_prompts)]
        if self._is_deterministic:
            parts = [(tuning.tile, True, np.ones_like(are_prompts))]
        launches: list[_PlannedLaunch] = []
        for tile, is_uniform, takes_part in parts[: 1 if skips_prompts else 2]:
            if takes_part.any():
                work = plan_work(
                    batch,
                    spec.sliding_window,
                    tile_tokens=tile.rows * spec.num_kv_heads // self._num_heads,
                    tile_keys=tile.keys,
                    splitting=tuning.splitting,
                    takes_part=takes_part,
                )
                launches.append(_PlannedLaunch(tile, is_uniform, work))
        return launches

    def cache(self, layer: int) -> torch.Tensor:
        """Blocks of a layer."""
        return self._caches[layer]

    def attend(
        self, step: _GroupStep, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attend, to prompts by the library if it took them; shapes as in `AttentionStep.attend`."""
        outputs = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if step.prompts:
            at, cache = step.prompts.tokens, self._caches[layer]
            attended = step.prompts.attend(queries[at], keys[at], values[at], cache, step.prompt_starts)
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
        assert queries.stride()[1:] == (head_dim, 1), "the heads of a token must be contiguous"
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

    def _send(
        self, batch: Batch, taken: list[PromptStep | None], plans: list[list[_PlannedLaunch]]
    ) -> Iterator[torch.Tensor]:
        """Fill the metadata in one copy.

        Returns views of it: per group slots and starts of prompts, then per launch items and merges.

        Arrays whose sizes depend only on the numbers of requests and tokens come first, where a graph finds them again.
        Block tables, which are as wide as the longest request needs, come last; items hold their places.
        """
        arrays: list[Ints] = []
        for prompts, plan, group_batch in zip(taken, plans, batch.groups, strict=True):
            arrays += [group_batch.slot_mapping, prompts.starts if prompts else _NO_INTS]
            arrays += [array for launch in plan for array in (launch.work.items, launch.work.merges)]
        num_views = len(arrays)
        arrays += [group_batch.block_tables for group_batch in batch.groups]
        starts = np.cumsum([0, *(aligned(array.size) for array in arrays)]).tolist()
        for plan, group_batch, start in zip(plans, batch.groups, starts[num_views:-1], strict=True):
            for launch in plan:
                items = launch.work.items
                items[:, 0] = start + items[:, 0] * group_batch.block_tables.shape[1]
        num_integers = starts[-1]
        assert num_integers <= len(self._metadata), "the batch exceeds the announced limits"
        # A new tensor for each step: the allocator of pinned memory reuses one only after it has been copied.
        host = torch.empty(num_integers, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        filled = host.numpy()
        for array, start in zip(arrays, starts, strict=False):
            filled[start : start + array.size] = array.ravel()
        self._metadata[:num_integers].copy_(host, non_blocking=True)
        return (
            self._metadata[start : start + array.size].view(array.shape)
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
    def cache(self, layer: int) -> PagedCache:
        return PagedCache(self._backend.cache(layer), self._steps[layer].slots)

    @override
    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self._backend.attend(self._steps[layer], layer, queries, keys, values)
