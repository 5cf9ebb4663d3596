"""The seam to CUDA graphs: work that is recorded once and queued again with one call.

Knows nothing of models. Tests put operations on the CPU in the place of graphs.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Capture(Protocol):
    """Records work on a device. Recordings share memory: what one has left in its output holds until another runs."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run work, which must not wait for the device.

        Returns:
            What queues the same work on the same memory again, and the tensor where that leaves its output.
        """


class CudaCapture:
    """CUDA graphs over one memory pool: they run one after the other, so each may use what the others used."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See `Capture`. The first run is eager: it compiles kernels and makes handles, which must not be recorded."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                work()
        finally:  # what it has queued reads what the next step overwrites, also where it has failed
            current.wait_stream(self._stream)
        try:
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                output = work()
        finally:
            torch.cuda.set_stream(current)  # a recording that fails leaves its own
        return graph.replay, output
