"""The cache of states of fixed size: one tensor per layer, indexed by torch, on any device.

A step reads its states before its tokens and writes them afterwards. A new request reads zeros, so that a slot need not
be cleared when it passes to another request.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import override

from weft.engine.cache.specs import CacheGroup, StateSpec
from weft.engine.layers.step_caches import StateStep
from weft.engine.step.batch import Batch, Ints
from weft.engine.step.transfer import fill, to_device


class StateCache:
    """Owns the states of all recurrent layers, each (num_slots, *shape); slot 0 is the null slot, for padding.

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
        by_layer = {
            layer: part for part, group in zip(slots, self.groups.values(), strict=True) for layer in group.layers
        }
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

    tensors: Mapping[int, torch.Tensor]
    slots_by_layer: Mapping[int, torch.Tensor]
    is_new: torch.Tensor
    query_start_locs: Ints

    @override
    def read(self, layer: int) -> torch.Tensor:
        states = self.tensors[layer].index_select(0, self.slots_by_layer[layer])
        is_new = self.is_new.view(-1, *(1,) * (states.dim() - 1))
        return states.masked_fill_(is_new, 0)  # unlike an index by a mask, this does not wait for the device

    @override
    def write(self, layer: int, states: torch.Tensor) -> None:
        self.tensors[layer].index_copy_(0, self.slots_by_layer[layer], states)

    @override
    def tensor(self, layer: int) -> torch.Tensor:
        return self.tensors[layer]

    @override
    def slots(self, layer: int) -> torch.Tensor:
        return self.slots_by_layer[layer]
