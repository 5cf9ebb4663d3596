"""What blocks see of a model's caches during one step."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from weft.engine.layers.attention import AttentionStep
from weft.engine.step.batch import Ints


class StateStep(Protocol):
    """Reads and writes the states of fixed size of one step, by copies or in place.

    `read` and `write` copy. A kernel that changes states in place takes `tensor`, `slots` and `is_new` instead.

    Attributes:
        query_start_locs: (num_requests + 1,) on the host, where each request's tokens start.
        is_new: (num_requests,) bool on the device, whether the request has no state yet. What its slot holds is then
            left over from another request and counts as zeros.
    """

    query_start_locs: Ints
    is_new: torch.Tensor

    def read(self, layer: int) -> torch.Tensor:
        """(num_requests, *shape): the states before this step's tokens, zeros for a new request."""

    def write(self, layer: int, states: torch.Tensor) -> None:
        """Keep the states (num_requests, *shape) after this step's tokens."""

    def tensor(self, layer: int) -> torch.Tensor:
        """(num_slots, *shape): the states of all requests, contiguous. Only the slots of this step may be changed."""

    def slots(self, layer: int) -> torch.Tensor:
        """(num_requests,) int64 on the device: the slot of each request, distinct except for slot 0 of padding."""


@dataclass(frozen=True, slots=True)
class StepCaches:
    """The caches of one step, by kind, and what its blocks leave for later ones.

    Attributes:
        states: None if no layer keeps a state.
        passed: By name, what a block made of the step's tokens and a later one reads.
    """

    attention: AttentionStep
    states: StateStep | None = None
    passed: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
