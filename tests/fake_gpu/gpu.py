"""A GPU that is not there: `with FakeGpu() as gpu` the engine starts on device cuda, and launches nothing."""

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from tests.fake_gpu.driver import HOPPER, SHARED_BYTES, FakeDriver, Record
from tests.fake_gpu.tensors import FakeCuda, WithIndex, address, device_guard
from weft.engine.device import CudaCapture
from weft.engine.tune.compare import Component, Tuner
from weft.engine.weights.tensor_files import RandomSource
from weft.engine.wire.machine import KernelChoice

MEMORY_BYTES = 80 << 30


class FakeGpu:
    """An H100 for the engine in this process; used as a context."""

    def __init__(self, capability: int = HOPPER, *, compiles: bool = True) -> None:
        """Without `compiles` kernels are recorded and not compiled, which takes hardly any time."""
        self.cuda = FakeCuda()
        self.driver = FakeDriver(capability, compiles=compiles)
        self._stack = contextlib.ExitStack()

    @property
    def record(self) -> Record:
        """What Triton has launched and compiled."""
        return self.driver.record

    @property
    def launches(self) -> Counter[str]:
        """All launches so far, Triton's and torch's."""
        return self.record.launches + self.cuda.launches

    def __enter__(self) -> Self:
        enter = self._stack.enter_context
        enter(patch.dict(os.environ, {"TRITON_DEFAULT_FP_FUSION": "1"}))  # as the engine sets it
        enter(patch.multiple(torch.cuda, **_cuda(self.driver.capability)))
        enter(patch.object(torch.backends.cuda, "preferred_blas_library", lambda name=None: name))
        enter(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        enter(patch.object(FakeTensor, "data_ptr", address))
        enter(patch.object(FakeTensor, "tolist", self._tolist()))
        enter(patch.multiple(CudaCapture, __init__=lambda capture: None, record=self._record_graph()))
        enter(device_guard())
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        enter(WithIndex())
        enter(patch.object(Tuner, "_compare", _prefer))
        enter(patch.object(RandomSource, "fill", lambda *_: None))  # thousands of copies for a large model
        enter(self.driver.active())
        enter(self.cuda)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _tolist(self) -> Callable[[torch.Tensor], Any]:
        def tolist(tensor: torch.Tensor) -> Any:
            self.cuda.wait("tolist")
            return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()

        return tolist

    def _record_graph(self) -> Callable[..., tuple[Callable[[], None], torch.Tensor]]:
        def record(_: CudaCapture, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            triton_before, torch_before = self.record.launches.copy(), self.cuda.launches.copy()
            output = work()
            by_triton, by_torch = self.record.launches - triton_before, self.cuda.launches - torch_before

            def replay() -> None:
                self.record.launches.update(by_triton)
                self.cuda.launches.update(by_torch)

            return replay, output

        return record


def _prefer(_: Tuner, component: Component) -> tuple[KernelChoice, bool]:
    """The preferred candidate: nothing can be compared or timed here."""
    return KernelChoice(component.name, component.shapes, component.names, component.names[0], ()), False


class _Event:
    """An event that the device has always reached, a millisecond after the one before it."""

    def __init__(self, **_: object) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return 1.0


def _cuda(capability: int) -> dict[str, Any]:
    """What replaces the functions of `torch.cuda` that the engine calls."""
    properties = SimpleNamespace(
        multi_processor_count=132,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=SHARED_BYTES[capability],
        L2_cache_size=50 << 20,
    )
    return {
        "_lazy_init": lambda: None,
        "Event": _Event,
        "is_available": lambda: True,
        "get_device_capability": lambda device=None: divmod(capability, 10),
        "get_device_name": lambda device=None: "a GPU that is not there",
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 1 << 30,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: None,
    }
