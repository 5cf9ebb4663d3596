"""States of a step that a test holds in its hands."""

from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import override

from weft.engine.batch import Ints
from weft.engine.layers.block import StateStep


def starts_of(*counts: int) -> Ints:
    """(num_requests + 1,) where the tokens of requests with these counts start."""
    return np.cumsum((0, *counts), dtype=np.int64)


@dataclass(slots=True)
class GivenStates(StateStep):
    """One cache, whose slots are in the order of the requests backwards, after the null slot."""

    states: torch.Tensor
    query_start_locs: Ints
    is_new: torch.Tensor

    @classmethod
    def of(cls, states: torch.Tensor, *counts: int) -> "GivenStates":
        """Requests with these states (num_requests, ...) that compute counts tokens; none of them is new."""
        stored = torch.cat((torch.full_like(states[:1], torch.nan), states.flip(0)))
        return cls(stored, starts_of(*counts), torch.zeros(len(states), dtype=torch.bool))

    @override
    def tensor(self, layer: int) -> torch.Tensor:
        return self.states

    @override
    def slots(self, layer: int) -> torch.Tensor:
        return torch.arange(len(self.is_new), 0, -1)

    @override
    def read(self, layer: int) -> torch.Tensor:
        states = self.states[self.slots(layer)]
        states[self.is_new] = 0
        return states

    @override
    def write(self, layer: int, states: torch.Tensor) -> None:
        self.states[self.slots(layer)] = states
