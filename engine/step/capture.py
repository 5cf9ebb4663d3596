"""Records work on a device as a CUDA graph, which queues it again with one call.

Knows nothing of models. Tests use operations on the CPU in place of graphs.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override


class Capture(Protocol):
    """Records work on a device. Recordings share memory: the output of one is valid until another one runs."""

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
