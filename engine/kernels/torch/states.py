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
from weft.engine.step.transfer import to_device


class StateCache:
    """Owns the states of all recurrent layers, each (num_slots, *shape); slot 0 is the null slot, for padding."""

    def __init__(self, groups: Mapping[int, CacheGroup[StateSpec]], num_states: int, device: torch.device) -> None:
        """Allocate num_states states and the null slot for each layer; keys of groups index `Batch.groups`."""
        self.groups = groups
        self._device = device
        self.states = {
            layer: torch.zeros((num_states + 1, *group.spec.shape), dtype=group.spec.dtype, device=device)
            for group in groups.values()
            for layer in group.layers
        }

    def begin(self, batch: Batch) -> "TorchStateStep":
        """Copy the states that the batch asks for, and look up those of its requests."""
        slots: dict[int, torch.Tensor] = {}
        for index, group in self.groups.items():
            part = batch.groups[index]
            self._copy(group.layers, part.block_copies)
            tables = to_device(np.ascontiguousarray(part.block_tables[:, 0]), self._device)
            slots.update(dict.fromkeys(group.layers, tables))
        is_new = to_device(batch.seq_lens == np.diff(batch.query_start_locs), self._device)
        return TorchStateStep(self.states, slots, is_new, batch.query_start_locs)

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
