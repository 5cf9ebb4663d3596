"""A module of transformers as a `Model` that computes one request after the other, with the module's own cache objects.

For modules whose attention is not Weft's, or that keep something else than keys and values: right, and slow.
"""

import enum
import inspect
import itertools
from collections import deque
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from typing_extensions import override

from weft.engine.cache.specs import CacheSpec, ModuleCache, StateSpec
from weft.engine.kernels.torch.caches import Context, ContextStep
from weft.engine.layers.block import Model, StepCaches

_CACHE_NAMES = ("past_key_values", "cache", "cache_params", "state")
_SLOT = StateSpec((), torch.uint8)
"""Nothing but the number of the slot that a request has."""
_MEASURED_TOKENS = 8, 40
"""Lengths of the contexts that tell what a token takes. A sliding window that is not full yet counts as growing."""


class GoingOn(enum.Enum):
    """How a module goes on with a context that it has begun."""

    CHUNKS = "in chunks"
    ONE_BY_ONE = "token by token after the first chunk"
    AGAIN = "by computing the whole context again in each step"


class RequestModel(Model):
    """A loaded module that runs request by request. Its hidden states are logits already.

    Attributes:
        going_on: Which way it goes on. The comparison at start-up finds out which ways are right.
        cache_specs: What its cache objects take, and slots for them.
        weights_bytes: Memory that parameters and buffers take; shared ones count once.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        """Take over a module that was loaded with an attention of its own."""
        self.cache_specs: tuple[CacheSpec, ...] = (ModuleCache(0, 0), _SLOT)
        tensors = {tensor.data_ptr(): tensor for tensor in (*module.parameters(), *module.buffers())}
        self.weights_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._module: Any = module  # its call and its output are typed by each architecture for itself
        accepted = inspect.signature(module.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in accepted), None)
        self.going_on = GoingOn.ONE_BY_ONE if self._cache_name else GoingOn.AGAIN
        self._accepted = frozenset(accepted)

    @override
    def forward(self, token_ids: Tensor, positions: Tensor, caches: StepCaches, rows: Tensor | None = None) -> Tensor:
        step, states = caches.attention, caches.states
        assert isinstance(step, ContextStep) and states is not None
        bounds = step.query_start_locs.tolist()
        slots: list[int] = states.slots(len(self.cache_specs) - 1).tolist()  # waits for the device
        starts = [int(n) for n in step.seq_lens - (step.query_start_locs[1:] - step.query_start_locs[:-1])]
        wanted = range(len(token_ids)) if rows is None else rows.tolist()
        contexts = step.backend.claim(slots, starts, step.block_tables)
        logits = []
        for slot, context, (first, end) in zip(slots, contexts, itertools.pairwise(bounds), strict=True):
            own = [row - end for row in wanted if first <= row < end]  # from the end
            computed = self.go_on(context, token_ids[None, first:end], -min(own, default=-1))
            logits.append(computed[own])
            step.backend.keep(slot, context)
        return torch.cat(logits)  # (num_rows, vocab_size)

    @override
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.to(torch.float32, copy=True)

    def plain_logits(self, token_ids: Tensor) -> Tensor:
        """Float32 logits of whole prompts (num_prompts, num_tokens), without a cache."""
        return torch.cat([self._logits(prompt[None], use_cache=False) for prompt in token_ids.unbind()]).float()

    def go_on(self, context: Context, token_ids: Tensor, num_rows: int) -> Tensor:
        """Compute the next tokens (1, num_tokens) of a context, which it then holds.

        Returns:
            (at least num_rows, vocab_size) logits of its last tokens.
        """
        if self.going_on is GoingOn.AGAIN:
            before = [] if context.token_ids is None else [context.token_ids]
            context.token_ids = torch.cat([*before, token_ids], dim=1)
            logits = self._logits(context.token_ids, num_rows, use_cache=False)
        elif self.going_on is GoingOn.ONE_BY_ONE and context.num_tokens:
            tokens = enumerate(token_ids.unbind(1), context.num_tokens)
            rows: deque[Tensor] = deque(maxlen=max(num_rows, 1))  # those of a whole chunk would fill the memory
            for start, token in tokens:
                rows.append(self._cached(context, start, token[None], 1))
            logits = torch.cat(list(rows), dim=1)
        else:
            logits = self._cached(context, context.num_tokens, token_ids, num_rows)
        context.num_tokens += token_ids.shape[1]
        return logits[0]

    def measure(self) -> None:
        """Set cache_specs: what the cache object of a context of real tokens takes."""
        sizes = []
        for num_tokens in _MEASURED_TOKENS:
            context, token_ids = Context(), torch.ones(1, num_tokens, dtype=torch.int64, device=self._module.device)
            self.go_on(context, token_ids, 1)
            sizes.append(_size([context.past, context.token_ids]))
        few, many = _MEASURED_TOKENS
        per_token = -(-(sizes[1] - sizes[0]) // (many - few))
        self.cache_specs = ModuleCache(per_token, max(sizes[0] - few * per_token, 0)), _SLOT

    def _cached(self, context: Context, start: int, token_ids: Tensor, num_rows: int) -> Tensor:
        if self._cache_name is None:
            raise ValueError("it has no cache")
        if start == 0 and self._module._supports_default_dynamic_cache():
            context.past = DynamicCache(config=self._module.config.get_text_config(decoder=True))
        output = self._call(token_ids, start, num_rows, use_cache=True, **{self._cache_name: context.past})
        returned = output.get(self._cache_name)
        context.past = context.past if returned is None else returned
        logits: Tensor = output.logits
        return logits

    def _logits(self, token_ids: Tensor, num_rows: int = 0, **others: object) -> Tensor:
        logits: Tensor = self._call(token_ids, 0, num_rows, **others).logits
        return logits

    def _call(self, token_ids: Tensor, start: int, num_rows: int, **others: object) -> Any:
        """Run the module; num_rows is how many of the last rows are wanted at least, 0 for all."""
        positions = torch.arange(start, start + token_ids.shape[1], device=token_ids.device)[None]
        known = {"position_ids": positions, "logits_to_keep": num_rows, **others}
        return self._module(input_ids=token_ids, **{name: known[name] for name in known if name in self._accepted})


def _size(root: object) -> int:
    """Bytes of all tensors that an object holds, whatever its class; storage that tensors share counts once."""
    storages: dict[int, int] = {}
    seen, left = set[int](), [root]
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, torch.nn.Module | type | str):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list | tuple | set):
            left += item
        elif type(item).__module__.startswith("transformers.") and hasattr(item, "__dict__"):
            left += vars(item).values()
    return sum(storages.values())
