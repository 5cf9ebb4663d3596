"""All caches of a model in one object: each kind of cache has a backend that serves its groups.

The runner begins a step with `Caches`. The blocks of the model then reach their caches, by index, through the result.
States of fixed size, and what a module that runs request by request keeps, are held here; keys and values are held by
the backends of attention. Imports no transformers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from weft.engine.batch import Batch, Ints
from weft.engine.cache.specs import CacheGroup, CacheSpec, StateSpec
from weft.engine.device import fill, to_device
from weft.engine.kernels.torch.encoder_step import EncoderCaches
from weft.engine.kernels.torch.mutual_step import MutualCaches
from weft.engine.layers.block import AttentionBackend, AttentionStep, Heads, PagedCache, StateStep, StepCaches


class StateCache:
    """Owns the states of all recurrent layers, each (num_slots, *shape); slot 0 is the null slot, for padding.

    A layer has one tensor, indexed by torch, on any device. A step reads its states before its tokens and writes them
    afterwards. A new request reads zeros, so that a slot need not be cleared when it passes to another request.

    A graph finds the slots of its requests in memory that never moves. Its padding counts as new requests, so that
    nothing grows in the null slot.
    """

    def __init__(self, groups: Mapping[int, CacheGroup[StateSpec]], num_states: int, device: torch.device) -> None:
        """Allocate num_states states and the null slot for each layer; keys of groups index `Batch.groups`."""
        self.groups = groups
        self._device = device
        self.states = {
            layer: torch.zeros((num_states + 1, *group.spec.shape), dtype=group.spec.dtype, device=device)
            for group in groups.values()
            for layer in group.layers
        }
        self._graph_slots = torch.zeros(len(groups) * num_states, dtype=torch.int64, device=device)
        self._graph_is_new = torch.zeros(num_states, dtype=torch.bool, device=device)

    def begin(self, batch: Batch) -> "TorchStateStep":
        """Copy the states that the batch asks for, and look up those of its requests."""
        num_rows = batch.graph.num_tokens if batch.graph else batch.num_requests
        on_host = np.zeros((len(self.groups), num_rows), np.int64)
        is_new_on_host = np.ones(num_rows, np.bool_)
        is_new_on_host[: batch.num_requests] = batch.seq_lens == np.diff(batch.query_start_locs)
        for row, (index, group) in enumerate(self.groups.items()):
            on_host[row, : batch.num_requests] = batch.groups[index].block_tables[:, 0]
            self._copy(group.layers, batch.groups[index].block_copies)
        starts = batch.query_start_locs
        if batch.graph:
            starts = np.arange(num_rows + 1)
            slots, is_new = self._graph_slots[: on_host.size].view(on_host.shape), self._graph_is_new[:num_rows]
            fill(slots, on_host)
            fill(is_new, is_new_on_host)
        else:
            slots, is_new = to_device(on_host, self._device), to_device(is_new_on_host, self._device)
        parts = zip(slots, self.groups.values(), strict=True)
        by_layer = {layer: part for part, group in parts for layer in group.layers}
        return TorchStateStep(self.states, by_layer, is_new, starts)

    def _copy(self, layers: tuple[int, ...], copies: Ints) -> None:
        if not len(copies):
            return
        sources, targets = to_device(copies, self._device).unbind(1)
        for layer in layers:
            self.states[layer].index_copy_(0, targets, self.states[layer].index_select(0, sources))


@dataclass(frozen=True, slots=True)
class TorchStateStep(StateStep):
    """The states of one step.

    Attributes:
        tensors: By layer, the states of all requests.
        slots_by_layer: By layer, (num_requests,) the slot of each request.
    """

    tensors: Mapping[int, Tensor]
    slots_by_layer: Mapping[int, Tensor]
    is_new: Tensor
    query_start_locs: Ints

    @override
    def read(self, layer: int) -> Tensor:
        states = self.tensors[layer].index_select(0, self.slots_by_layer[layer])
        is_new = self.is_new.view(-1, *(1,) * (states.dim() - 1))
        return states.masked_fill_(is_new, 0)  # unlike an index by a mask, this does not wait for the device

    @override
    def write(self, layer: int, states: Tensor) -> None:
        self.tensors[layer].index_copy_(0, self.slots_by_layer[layer], states)

    @override
    def tensor(self, layer: int) -> Tensor:
        return self.tensors[layer]

    @override
    def slots(self, layer: int) -> Tensor:
        return self.slots_by_layer[layer]


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
    token_ids: Tensor | None = None


class ContextBackend(AttentionBackend):
    """Owns the contexts of all requests. Takes the place of attention, which these modules do themselves.

    A context holds one object of transformers, found by the request's slot. A slot passes from one request to the next,
    and so do blocks. What a request that has gone away left behind is dropped at the latest when one of its blocks goes
    to another request. So all objects together never hold more tokens than there are blocks for, nor are there more of
    them than slots.
    """

    name = "of the module, request by request"
    supports_graphs = False

    def __init__(self, num_blocks: int) -> None:
        """Hold nothing yet; blocks are numbered below num_blocks."""
        self._contexts: dict[int, Context] = {}
        self._owners = np.full(num_blocks, _NOBODY)

    @override
    def prepare(self) -> bool:
        return False

    @override
    def blocks(self, layer: int) -> tuple[Tensor, ...]:
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
    def attend(self, layer: int, heads: Heads, sinks: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        raise AssertionError("the module attends itself")


@dataclass(frozen=True, slots=True)
class Caches:
    """The backends of a model; states is None if no layer keeps a state, encoder if there is none, mutual likewise."""

    attention: AttentionBackend
    states: StateCache | None = None
    encoder: EncoderCaches | None = None
    mutual: MutualCaches | None = None

    @property
    def name(self) -> str:
        """Name of the attention backend, for the log."""
        return self.attention.name

    @property
    def supports_graphs(self) -> bool:
        """See `AttentionBackend`."""
        return self.attention.supports_graphs

    @property
    def are_graphs_of_decodes(self) -> bool:
        """Whether graphs can only hold steps in which each request computes one token.

        Layers with states see on the host how many tokens each request has.
        """
        return self.states is not None

    @property
    def may_repeat(self) -> bool:
        """Whether a failed step may be launched again: true if it then writes the same values to the same places."""
        return self.states is None

    def prepare(self) -> bool:
        """See `AttentionBackend`."""
        return self.attention.prepare()

    def blocks(self, groups: Sequence[CacheGroup[CacheSpec]]) -> list[list[Tensor]]:
        """The tensors that hold the blocks of each cache group, each (num_blocks, ...) and contiguous."""
        return [[tensor for layer in group.layers for tensor in self._layer_blocks(layer)] for group in groups]

    def _layer_blocks(self, layer: int) -> Sequence[Tensor]:
        if self.states is not None and layer in self.states.states:
            return (self.states.states[layer],)
        return self.attention.blocks(layer)

    def begin(self, batch: Batch) -> StepCaches:
        """Do the copies of the batch, and prepare what the layers of each kind share."""
        if self.encoder is not None:
            return self.encoder.begin(self.attention, batch)
        if self.mutual is not None and batch.pictures:
            return StepCaches(self.mutual.begin(self.attention, batch))
        if self.states is None:
            return StepCaches(self.attention.begin(batch))
        paged = tuple(group for index, group in enumerate(batch.groups) if index not in self.states.groups)
        return StepCaches(self.attention.begin(dataclasses.replace(batch, groups=paged)), self.states.begin(batch))
