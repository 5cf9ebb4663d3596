"""Hands hidden states from one pipeline stage to the next, and those of the wanted rows from the last to the first.

Every stage computes every step, in the same order. Ranks are numbered stage by stage; each hands over to its equal.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from typing_extensions import override

from weft.engine.layers.block import Block, BlockStep
from weft.engine.layers.parts import Layer


@dataclass(frozen=True, slots=True)
class Received:
    """Stands for the embedding of a later stage: hidden states come from the rank before."""

    source: int
    hidden_size: int
    dtype: torch.dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Wait for those of a step's tokens."""
        hidden = torch.empty(len(token_ids), self.hidden_size, dtype=self.dtype, device=token_ids.device)
        dist.recv(hidden, self.source)
        return hidden


@dataclass(frozen=True, slots=True)
class LaterStages(Block):
    """Stands for the blocks of all later stages, behind those of a stage.

    Attributes:
        target: The rank behind.
        last: The rank that returns the rows; None if this is not the first stage, which alone wants them.
    """

    target: int
    last: int | None

    @override
    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        dist.send(hidden.contiguous(), self.target)
        num_rows = len(hidden) if step.rows is None else len(step.rows)
        result = hidden.new_empty(num_rows, hidden.size(1))
        if num_rows and self.last is not None:
            dist.recv(result, self.last)
        return result


def returned(first: int) -> Layer:
    """Stands for the final norm, which the first stage has, in the last one: its rank gets the rows."""

    def send(hidden: torch.Tensor) -> torch.Tensor:
        dist.send(hidden.contiguous(), first)
        return hidden

    return send
