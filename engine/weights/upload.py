"""Host tensors to the device through pinned buffers, so that reading one part overlaps with copying another.

From memory that is not pinned, as a mapped file is, the driver copies through a small buffer of its own while the host
waits. Here all of torch's threads read a part into a pinned buffer while the device fetches the part before it.
"""

from collections.abc import Callable
from itertools import cycle
from typing import Protocol

import torch

_NUM_BUFFERS = 3
_BUFFER_BYTES = 32 << 20


class Event(Protocol):
    """What is needed of `torch.cuda.Event`."""

    def record(self) -> None:
        """Mark this point in what the device has been given."""

    def synchronize(self) -> None:
        """Wait until the device is there; at once when nothing was marked."""


class PinnedUpload:
    """Owner of the buffers, which are used in turn."""

    def __init__(
        self,
        device: torch.device,
        *,
        buffer_bytes: int = _BUFFER_BYTES,
        make_event: Callable[[], Event] = torch.cuda.Event,
    ) -> None:
        """Allocate the buffers; tensors on the device are what `copy` fills."""
        self._buffer_bytes = buffer_bytes
        is_pinned = device.type == "cuda"
        buffers = [
            (torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=is_pinned), make_event())
            for _ in range(_NUM_BUFFERS)
        ]
        self._buffers = cycle(buffers)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a copy from the host to the device; source may be dropped when this returns.

        Both are contiguous and have the same shape; another dtype is converted on the device.
        """
        stored = target if source.dtype == target.dtype else torch.empty_like(target, dtype=source.dtype)
        for octets, destination in zip(self._parts(source), self._parts(stored), strict=True):
            buffer, is_free = next(self._buffers)
            is_free.synchronize()
            destination.copy_(buffer[: len(octets)].copy_(octets), non_blocking=True)
            is_free.record()
        if stored is not target:
            target.copy_(stored)

    def _parts(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Its bytes, as many at a time as a buffer holds."""
        return torch.split(tensor.view(-1).view(torch.uint8), self._buffer_bytes)
