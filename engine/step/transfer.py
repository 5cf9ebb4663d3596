"""Host arrays to the device, and results back, without waiting for the device.

On CUDA everything passes through pinned memory, which the device reads and writes by itself. On the CPU nothing moves.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.int64] | npt.NDArray[np.int32] | npt.NDArray[np.float32] | npt.NDArray[np.uint8]


def to_device(array: Array, device: torch.device) -> Tensor:
    """The array as a tensor on the device. On the CPU it shares the array's memory: read it only."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)  # from pageable memory the host would wait
    return tensor.to(device)


def fill(target: Tensor, array: Array) -> None:
    """Overwrite a tensor, contiguous, with an array of its shape and type: memory that a CUDA graph reads stays put."""
    tensor = torch.from_numpy(array)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Put a mark behind what the device has been given, which tells the time when it is reached; None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Download:
    """Results of a step on their way to the host: one copy into pinned memory, queued right behind the step.

    `wait` waits for that copy and not for the device, which may have been given the next step by then.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Queue the copy of tensors that all lie on one device."""
        self._tensors = list(tensors)
        self._event: torch.cuda.Event | None = None
        if self._tensors and self._tensors[0].is_cuda:
            packed = pack(self._tensors)
            self._host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, in the order given. The one place where the host waits for a step."""
        if self._event is not None:
            self._event.synchronize()
            self._tensors, self._event = unpack(self._host, self._tensors), None
        return self._tensors


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all tensors in one, the widest types first, so that each begins at a multiple of its width."""
    octets = [tensors[index].reshape(-1).view(torch.uint8) for index in _widest_first(tensors)]
    return torch.cat(octets) if len(octets) > 1 else octets[0]


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What `pack` made of tensors, taken apart again into tensors of the same shapes that share packed's memory."""
    unpacked = list(tensors)
    start = 0
    for index in _widest_first(tensors):
        end = start + tensors[index].nbytes
        unpacked[index] = packed[start:end].view(tensors[index].dtype).view(tensors[index].shape)
        start = end
    return unpacked


def _widest_first(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
