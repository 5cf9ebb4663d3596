"""Copies whole blocks out of the caches of a model, of one rank or of several, into rows of bytes, and back.

A row holds one block of a cache group: of all layers, and of all models whose caches have the same block ids. Nothing
here knows what the bytes mean; a backend alone knows the layout of its blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from typing_extensions import override


class BlockBytes:
    """Reads and writes the blocks of all cache groups in this process; owns none of them.

    Attributes:
        row_bytes: Bytes of a row, by cache group.
    """

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]], device: torch.device) -> None:
        """Take the tensors that hold the blocks of each cache group, each (num_blocks, ...) and contiguous."""
        self._groups = [[tensor.flatten(1).view(torch.uint8) for tensor in tensors] for tensors in groups]
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self.row_bytes = tuple(sum(tensor.shape[1] for tensor in tensors) for tensors in self._groups)

    def host_bytes(self, group: int) -> int:
        """What a row takes in the memory of the host, which torch pins in powers of two."""
        size = self.row_bytes[group]
        return 1 << (size - 1).bit_length() if self._is_cuda else size

    def read(self, group: int, block: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Copy a block, behind all launched steps.

        Returns:
            (row_bytes,) uint8 on the host, and what to wait for before it is read; None on the CPU.
        """
        row = self.joined(group, block)
        if not self._is_cuda:
            return row, None
        pinned = torch.empty(len(row), dtype=torch.uint8, pin_memory=True)
        pinned.copy_(row, non_blocking=True)
        return pinned, self.mark()

    def joined(self, group: int, block: int) -> torch.Tensor:
        """(row_bytes,) uint8 on the device: a copy of a block."""
        return torch.cat([tensor[block] for tensor in self._groups[group]])

    def mark(self) -> torch.cuda.Event | None:
        """Mark the end of all launched steps on the device; None on the CPU, where they are over."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def write(self, group: int, block: int, row: torch.Tensor, behind: torch.cuda.Event | None) -> None:
        """Overwrite a block with a row, behind this mark; returns when it is done. For a thread beside the engine's."""
        if self._stream is None or behind is None:
            for tensor, part in self._parts(group, row):
                tensor[block].copy_(part)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(behind)
            for tensor, part in self._parts(group, row.to(self._groups[group][0].device, non_blocking=True)):
                tensor[block].copy_(part)
        self._stream.synchronize()

    def _parts(self, group: int, row: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = 0
        for tensor in self._groups[group]:
            yield tensor, row[start : start + tensor.shape[1]]
            start += tensor.shape[1]


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
    """The blocks of all ranks, in the process of the first.

    So what evicted blocks go through, memory and disk, is that of the first rank alone. A row holds its block, those of
    its draft model included, then that of each other rank. Blocks come by a collective, at one place among the steps of
    all ranks. They go back as messages, which another rank heeds behind the steps that were sent before.
    """

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
        pairs = zip(self._own_bytes, self._shared_bytes, strict=True)
        self.row_bytes = tuple(own + others * part for own, part in pairs)

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
