"""Copies blocks out of the caches of several ranks into the first one's rows of bytes, and back.

So what evicted blocks go through, memory and disk, is that of the first rank alone. A row holds its block, those of its
draft model included, then that of each other rank. Blocks come by a collective, at one place among the steps of all
ranks. They go back as messages, which another rank heeds behind the steps that were sent before.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from typing_extensions import override

from weft.engine.offload.block_bytes import BlockBytes


class ReadBlock(NamedTuple):
    """Tells another rank to give its block to the first."""

    group: int
    block: int


class WriteBlock(NamedTuple):
    """Tells another rank to overwrite its block."""

    group: int
    block: int
    data: bytes


class RankedBlocks(BlockBytes):
    """The blocks of all ranks, in the process of the first."""

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        shared: Sequence[int],
        device: torch.device,
        send: Callable[[Sequence[ReadBlock | WriteBlock]], None],
    ) -> None:
        """See `BlockBytes`.

        Args:
            shared: For each cache group the number of its tensors that all ranks have, which come first.
            send: Sends each other rank its message.
        """
        super().__init__(groups, device)
        self._send = send
        self._own_bytes = self.row_bytes
        self._shared_bytes = [
            sum(tensor.shape[1] for tensor in tensors[:number])
            for tensors, number in zip(self._groups, shared, strict=True)
        ]
        others = dist.get_world_size() - 1
        self.row_bytes = tuple(
            own + others * part for own, part in zip(self._own_bytes, self._shared_bytes, strict=True)
        )

    @override
    def joined(self, group: int, block: int) -> torch.Tensor:
        own, size = super().joined(group, block), dist.get_world_size()
        part = own[: self._shared_bytes[group]]
        parts = [torch.empty_like(part) for _ in range(size)]
        self._send([ReadBlock(group, block)] * (size - 1))
        dist.gather(part, parts)
        return torch.cat((own, *parts[1:]))

    @override
    def write(self, group: int, block: int, row: torch.Tensor, behind: torch.cuda.Event | None) -> None:
        own, others = row.tensor_split((self._own_bytes[group],))
        parts = others.view(-1, self._shared_bytes[group])
        self._send([WriteBlock(group, block, part.numpy().tobytes()) for part in parts])
        super().write(group, block, own, behind)


def obey(blocks: BlockBytes, message: ReadBlock | WriteBlock) -> None:
    """Do what the first rank tells another one, which has these blocks."""
    if isinstance(message, ReadBlock):
        dist.gather(blocks.joined(*message))
    else:
        row = torch.frombuffer(bytearray(message.data), dtype=torch.uint8)
        blocks.write(message.group, message.block, row, None)
