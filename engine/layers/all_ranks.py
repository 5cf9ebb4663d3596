"""Layers in which ranks exchange tensors: within a pipeline stage, and from one stage to the next.

Within a stage each rank has a part of a layer. What the ranks make is put together by sums or, for logits, side by
side. All ranks of the stage call these layers in the same order, with the same tokens. Without pipeline stages these
are all ranks.

Every stage computes every step, in the same order. It hands hidden states to the next one, and the last hands those of
the wanted rows to the first. Ranks are numbered stage by stage; each hands over to its equal.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.layers.block import Block, BlockStep, Layer


class StageRanks:
    """The ranks of this process's pipeline stage."""

    group: ClassVar[dist.ProcessGroup | None] = None
    """None for all ranks; torch keeps its groups in one place for a process, too."""

    @classmethod
    def meet(cls, num_ranks: int) -> None:
        """Divide all ranks into stages of so many; every rank calls it when all have met."""
        size = dist.get_world_size()
        groups = [dist.new_group(list(range(first, first + num_ranks))) for first in range(0, size, num_ranks)]
        cls.group = groups[dist.get_rank() // num_ranks]


def of_all_ranks(layer: Layer) -> Layer:
    """Sum the layer's inputs over all ranks, in place, before the layer."""

    def sum_first(inputs: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(inputs, group=StageRanks.group)
        return layer(inputs)

    return sum_first


def norm_of_all_ranks(weight: torch.Tensor | None, eps: float) -> Layer:
    """RMSNorm of a vector of which each rank has a part of one size; weight is of this rank's part."""

    def norm(hidden: torch.Tensor) -> torch.Tensor:
        values = hidden.float()
        squares = values.square().sum(-1, keepdim=True)
        dist.all_reduce(squares, group=StageRanks.group)  # a part that several ranks have counts as often as any other
        scales = squares.div_(hidden.size(-1) * dist.get_world_size(StageRanks.group)).add_(eps).rsqrt_()
        normed = values.mul(scales).to(hidden.dtype)
        return normed if weight is None else normed.mul_(weight)

    return norm


def embedding_of_all_ranks(embedding: Layer, first: int, size: int) -> Layer:
    """An embedding of which this rank has size rows, from the first id on."""

    def embed(token_ids: torch.Tensor) -> torch.Tensor:
        own = token_ids - first
        rows = embedding(own.clamp(0, size - 1))
        rows.masked_fill_(((own < 0) | (own >= size)).unsqueeze(1), 0)
        dist.all_reduce(rows, group=StageRanks.group)
        return rows

    return embed


def of_all_ids(vocab_size: int) -> Layer:
    """The rank's logits -> those of all ids on the first rank, which alone samples; on others they stay.

    Each rank has the ids that `weft.engine.models.cut` gives it.
    """

    def gather(logits: torch.Tensor) -> torch.Tensor:
        size = dist.get_world_size(StageRanks.group)
        ends = [vocab_size * rank // size for rank in range(size + 1)]
        padded = F.pad(logits, (0, -(-vocab_size // size) - logits.size(1)))  # gathered parts are of one size
        if dist.get_rank(StageRanks.group):
            dist.gather(padded, group=StageRanks.group, group_dst=0)
            return logits
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.gather(padded, parts, group=StageRanks.group, group_dst=0)
        return torch.cat([part[:, : ends[rank + 1] - ends[rank]] for rank, part in enumerate(parts)], 1)

    return gather


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
