"""Uses a device without waiting for it: copies to it and back, recorded work, and the errors of a full memory.

On CUDA copies go through pinned memory, which the device reads and writes by itself. On the CPU nothing is copied.
Recorded work is a CUDA graph, which queues it again with one call. Nothing here knows models.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

Array = (
    npt.NDArray[np.int64]
    | npt.NDArray[np.int32]
    | npt.NDArray[np.float32]
    | npt.NDArray[np.uint8]
    | npt.NDArray[np.bool_]
)


def to_device(array: Array, device: torch.device) -> Tensor:
    """The array as a tensor on the device. On the CPU it shares the array's memory, so do not write to it."""
    return upload(torch.from_numpy(array), device)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device; on the CPU itself."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)  # the host would wait for pageable memory
    return tensor.to(device)


def fill(target: Tensor, array: Array) -> None:
    """Overwrite a contiguous tensor, such as the input of a CUDA graph, with an array of its shape and type."""
    tensor = torch.from_numpy(array)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Record an event, with its time, behind the work queued so far; None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Download:
    """Results of a step on their way to the host: one copy into pinned memory, queued right after the step.

    `wait` waits for that copy only. The device may already have the next step. A step without results has an end, too:
    the host would otherwise queue a long prompt as fast as it can schedule.

    Attributes:
        ended: Marks the end of the step, its copy included; None on the CPU.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Queue the copy of tensors, which are all on this device; there may be none."""
        self._tensors = list(tensors)
        self._host: Tensor | None = None
        if self._tensors and device.type == "cuda":
            packed = pack(self._tensors)
            self._host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
        self.ended = mark(device)

    def wait(self) -> list[Tensor]:
        """The tensors on the host, in the given order. Here alone the host waits for work of the device."""
        if self.ended is not None:
            self.ended.synchronize()
        if self._host is not None:
            self._tensors, self._host = unpack(self._host, self._tensors), None
        return self._tensors


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the bytes of all tensors, widest types first, so that each starts at a multiple of its width."""
    octets = [tensors[index].reshape(-1).view(torch.uint8) for index in _widest_first(tensors)]
    return torch.cat(octets) if len(octets) > 1 else octets[0]


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split the result of `pack` into tensors of the same shapes, which share its memory."""
    unpacked = list(tensors)
    start = 0
    for index in _widest_first(tensors):
        end = start + tensors[index].nbytes
        unpacked[index] = packed[start:end].view(tensors[index].dtype).view(tensors[index].shape)
        start = end
    return unpacked


def _widest_first(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())


class Capture(Protocol):
    """Records work on a device. Recordings share memory: the output of one is valid until another one runs.

    Tests use operations on the CPU in place of graphs.
    """

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run work, which must not wait for the device.

        Returns:
            A call that queues the same work on the same memory again, and the tensor that holds its output.
        """


class CudaCapture(Capture):
    """CUDA graphs over one memory pool, which they can share because they run one after another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @override
    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        # The first run is eager: it compiles kernels and creates handles, which a recording must not do.
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                work()
        finally:  # queued work, even of a failed run, reads memory that the next step overwrites
            current.wait_stream(self._stream)
        try:
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                output = work()
        finally:
            torch.cuda.set_stream(current)  # a failed recording leaves its own stream
        return graph.replay, output


# In errors of the driver ("CUDA error: out of memory", "Triton Error [CUDA]: out of memory") and of cuBLAS.
_WORDS = ("out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether missing memory caused an error, or an error in its context: a recording then fails with its own error.

    Only torch's allocator raises `torch.OutOfMemoryError`. Creating a graph and loading a kernel take memory from the
    driver, which raises other errors, and so does cuBLAS.
    """
    while error is not None:
        is_meant = isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)
        if is_meant or isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False
