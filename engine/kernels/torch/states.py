"""The reference for states of fixed size: one tensor a layer, read and written by torch's indexing, on any device.

The states of a step are read before its tokens and written behind them. A request that begins reads zeros, so a slot
need not be cleared when it changes hands.
"""

from collections.abc import Mapping

import numpy as np
import torch

from weft.engine.cache.specs import CacheGroup, StateSpec
from weft.engine.step.batch import Batch, Ints


class StateCache:
    """Owns the states of all recurrent layers, each (num_slots, *shape) with the null slot 0 for padding."""

    def __init__(self, groups: Mapping[int, CacheGroup[StateSpec]], num_states: int, device: torch.device) -> None:
        """Allocate num_states states and the null slot for each layer; groups by their place among those of a batch."""
        self.groups = groups
        self._device = device
        self.states = {
            layer: torch.zeros((num_states + 1, *group.spec.shape), dtype=group.spec.dtype, device=device)
            for group in groups.values()
            for layer in group.layers
        }

    def begin(self, batch: Batch) -> "StateStep":
        """Copy the states that the batch asks for, and find those of its requests."""
        slots: dict[int, torch.Tensor] = {}
        for index, group in self.groups.items():
            part = batch.groups[index]
            self._copy(group.layers, part.block_copies)
            slots.update(dict.fromkeys(group.layers, self._to_device(part.block_tables[:, 0])))
        is_first = batch.seq_lens == np.diff(batch.query_start_locs)
        return StateStep(self.states, slots, self._to_device(is_first), batch.query_start_locs)

    def _copy(self, layers: tuple[int, ...], copies: Ints) -> None:
        if not len(copies):
            return
        sources, targets = self._to_device(copies).unbind(1)
        for layer in layers:
            self.states[layer].index_copy_(0, targets, self.states[layer].index_select(0, sources))

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


class StateStep:
    """The states of one step.

    Attributes:
        query_start_locs: (num_requests + 1,) on the host, where each request's tokens start.
    """

    def __init__(
        self,
        states: Mapping[int, torch.Tensor],
        slots: Mapping[int, torch.Tensor],
        is_first: torch.Tensor,
        starts: Ints,
    ) -> None:
        """Read and write the slots (num_requests,) of each layer; is_first (num_requests,) marks who begins."""
        self._states = states
        self._slots = slots
        self._is_first = is_first
        self.query_start_locs = starts

    def read(self, layer: int) -> torch.Tensor:
        """(num_requests, *shape): the states before the tokens of the step, zeros where a request begins."""
        states = self._states[layer].index_select(0, self._slots[layer])
        states[self._is_first] = 0
        return states

    def write(self, layer: int, states: torch.Tensor) -> None:
        """Keep (num_requests, *shape), the states behind the tokens of the step."""
        self._states[layer].index_copy_(0, self._slots[layer], states)
