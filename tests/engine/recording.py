"""CUDA graphs on the CPU: a `Capture` that keeps torch's operations and runs them again on the very same memory.

What a graph cannot do fails here, too: read a value on the host, or follow numbers that change after the recording.
And a backend that such graphs can hold.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.engine.batch import Batch
from weft.engine.cache.specs import CacheGroup, PagedKV
from weft.engine.layers.block import Heads

_SYNCS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in _SYNCS, f"{func} waits for the device"
        outputs = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, outputs))
        return outputs


class RecordedCapture:
    """Runs work once, as on CUDA, then records it."""

    num_recorded = 0

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        work()
        with _Recorder() as recorder:
            output = work()
        self.num_recorded += 1
        return lambda: _replay(recorder.calls), output


def _replay(calls: list[tuple[Any, Any, Any, Any]]) -> None:
    for func, args, kwargs, outputs in calls:
        again = func(*args, **kwargs)
        for kept, new in zip(tree_leaves(outputs), tree_leaves(again), strict=True):
            if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                kept.copy_(new)


class StaticBackend:
    """Attention over memory that stays in place. Padding writes to a slot of its own, and gets zeros."""

    name = "static"
    supports_graphs = True

    def __init__(
        self, groups: tuple[CacheGroup[PagedKV], ...], num_blocks: int, block_size: int, max_num_tokens: int
    ) -> None:
        assert len(groups) == 1 and groups[0].spec.sliding_window is None
        spec = groups[0].spec
        self._block_size = block_size
        self._num_slots = num_blocks * block_size
        shape = (self._num_slots + 1, spec.num_kv_heads, spec.head_dim)
        self.keys = {layer: torch.zeros(shape) for layer in groups[0].layers}
        self.values = {layer: torch.zeros(shape) for layer in groups[0].layers}
        self.slots = torch.zeros(max_num_tokens, dtype=torch.int64)
        self.context_lens = torch.zeros(max_num_tokens, dtype=torch.int64)
        self.context_slots = torch.zeros((max_num_tokens, num_blocks * block_size), dtype=torch.int64)

    def prepare(self) -> bool:
        """Nothing to do."""
        return False

    def begin(self, batch: Batch) -> "StaticStep":
        """Every token becomes a request of one token, which sees those before it; padding sees none."""
        (group,) = batch.groups
        for caches in (self.keys, self.values):
            for cache in caches.values():
                blocks = cache[:-1].view(-1, self._block_size, *cache.shape[1:])
                blocks[group.block_copies[:, 1]] = blocks[group.block_copies[:, 0]]
        num_tokens = batch.graph.num_tokens if batch.graph else batch.num_tokens
        requests = np.repeat(np.arange(batch.num_requests), np.diff(batch.query_start_locs))
        tables = group.block_tables[requests]
        slots = (tables[:, :, None] * self._block_size + np.arange(self._block_size)).reshape(
            len(tables), tables.shape[1] * self._block_size
        )
        self.context_slots.zero_()
        self.context_slots[: len(slots), : slots.shape[1]] = torch.from_numpy(slots)
        self.context_lens[:num_tokens] = 0
        self.context_lens[: len(requests)] = torch.from_numpy(batch.positions + 1)
        self.slots[:num_tokens] = self._num_slots
        self.slots[: len(requests)] = torch.from_numpy(group.slot_mapping)
        return StaticStep(self, num_tokens)


class StaticStep:
    def __init__(self, backend: StaticBackend, num_tokens: int) -> None:
        self._backend = backend
        self._num_tokens = num_tokens

    def cache(self, layer: int) -> None:
        """`attend` writes."""

    def attend(
        self, layer: int, heads: Heads, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        queries, keys, values = heads
        backend, num_tokens = self._backend, self._num_tokens
        backend.keys[layer].index_copy_(0, backend.slots[:num_tokens], keys)
        backend.values[layer].index_copy_(0, backend.slots[:num_tokens], values)
        context = backend.context_slots[:num_tokens]
        keys, values = backend.keys[layer][context], backend.values[layer][context]  # (tokens, context, heads, dim)
        num_shared = queries.shape[1] // keys.shape[2]
        queries = queries.unflatten(1, (-1, num_shared))
        scores = torch.einsum("tgsd,tcgd->tgsc", queries, keys) * queries.shape[-1] ** -0.5
        is_seen = torch.arange(context.shape[1]) < backend.context_lens[:num_tokens, None]
        weights = scores.masked_fill(~is_seen[:, None, None], float("-inf")).softmax(-1)  # of no keys not-a-numbers
        return torch.einsum("tgsc,tcgd->tgsd", weights.nan_to_num(), values).flatten(1, 2)
