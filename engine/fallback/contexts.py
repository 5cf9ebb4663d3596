"""The caches of a module that runs request by request: one object of transformers for each request, found by its slot.

A slot passes from one request to the next, and so do blocks. What a request that has gone away left behind is dropped
at the latest when one of its blocks goes to another request. So all objects together never hold more tokens than there
are blocks for, nor are there more of them than slots. Imports no transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import override

from weft.engine.layers.attention import AttentionBackend, AttentionStep, PagedCache
from weft.engine.step.batch import Batch, Ints

_NOBODY = 0
"""The null slot, which no request has."""


@dataclass(slots=True)
class Context:
    """What is kept of one request.

    Attributes:
        num_tokens: Tokens that have been computed.
        past: The module's cache object, None if it has none.
        token_ids: (1, num_tokens) if the module computes them again in each step, else None.
    """

    num_tokens: int = 0
    past: object = None
    token_ids: torch.Tensor | None = None


class ContextBackend(AttentionBackend):
    """Owns the contexts of all requests. Takes the place of attention, which these modules do themselves."""

    name = "of the module, request by request"
    supports_graphs = False

    def __init__(self, num_blocks: int) -> None:
        """Hold nothing yet; blocks are numbered below num_blocks."""
        self._contexts: dict[int, Context] = {}
        self._owners = np.full(num_blocks, _NOBODY)

    @property
    def num_contexts(self) -> int:
        """Contexts that are held."""
        return len(self._contexts)

    @override
    def prepare(self) -> bool:
        return False

    @override
    def blocks(self, layer: int) -> tuple[torch.Tensor, ...]:
        return ()

    @override
    def begin(self, batch: Batch) -> "ContextStep":
        (group,) = batch.groups
        return ContextStep(self, batch.query_start_locs, batch.seq_lens, group.block_tables)

    def claim(self, slots: Sequence[int], starts: Sequence[int], tables: Ints) -> list[Context]:
        """Take out the contexts of requests, a new one for each that begins; `keep` puts them back.

        Drops the contexts of slots that begin anew, and those that have lost a block.

        Args:
            starts: Tokens of each request that earlier steps computed.
            tables: (num_requests, max_num_blocks) the blocks that count each request's tokens, padded with 0.
        """
        for slot, start in zip(slots, starts, strict=True):
            if start == 0:
                self._drop(slot)
        for slot, table in zip(slots, tables, strict=True):
            blocks = table[table != 0]
            for other in set(self._owners[blocks].tolist()) - {_NOBODY, slot}:
                self._drop(other)
            self._owners[blocks] = slot
        contexts = []
        for slot, start in zip(slots, starts, strict=True):
            context = self._contexts.pop(slot, None) or Context()
            if context.num_tokens != start:
                raise RuntimeError(f"slot {slot} holds {context.num_tokens} tokens, its request has computed {start}")
            contexts.append(context)
        return contexts

    def keep(self, slot: int, context: Context) -> None:
        """Hold a context until its slot or one of its blocks goes to another request."""
        self._contexts[slot] = context

    def _drop(self, slot: int) -> None:
        self._contexts.pop(slot, None)
        self._owners[self._owners == slot] = _NOBODY


@dataclass(frozen=True, slots=True)
class ContextStep(AttentionStep):
    """The requests of one step, on the host; see `Batch`."""

    backend: ContextBackend
    query_start_locs: Ints
    seq_lens: Ints
    block_tables: Ints

    @override
    def cache(self, layer: int) -> PagedCache | None:
        return None

    @override
    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        raise AssertionError("the module attends itself")
