"""What blocks see of a model's caches during one step."""

from dataclasses import dataclass
from typing import Protocol

import torch

from weft.engine.layers.attention import AttentionStep
from weft.engine.step.batch import Ints


class StateStep(Protocol):
    """Reads and writes the states of fixed size of one step.

    Attributes:
        query_start_locs: (num_requests + 1,) on the host, where each request's tokens start.
    """

    query_start_locs: Ints

    def read(self, layer: int) -> torch.Tensor:
        """(num_requests, *shape): the states before this step's tokens, zeros for a new request."""

    def write(self, layer: int, states: torch.Tensor) -> None:
        """Keep the states (num_requests, *shape) after this step's tokens."""


@dataclass(frozen=True, slots=True)
class StepCaches:
    """The caches of one step, by kind; states is None if no layer keeps a state."""

    attention: AttentionStep
    states: StateStep | None = None
