"""Tensors on a GPU that is not there: shapes, types and devices are checked, launches and waits counted.

torch's fake tensors have no values. What is on the CPU stays real; what is on CUDA, or becomes so, is fake. What the
host reads of a fake tensor is zeros, and is noted as a wait. An operator that is not a view, and allocates more than
memory, counts as one launch, though a few have several.
"""

import contextlib
import ctypes
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from tests.fake_gpu.rules import check_types

CUDA = torch.device("cuda", 0)
_CPU_TYPE, _CUDA_TYPE = 0, 1  # of `c10::DeviceType`
_BASE_ADDRESS = 1 << 30  # torch's allocations on CUDA start at multiples of 512
_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten._reshape_alias.default,
    _aten._unsafe_view.default,
    _aten.resize_.default,
}
_READS: dict[Any, Callable[[torch.Tensor], Any]] = {
    _aten._local_scalar_dense.default: lambda tensor: torch.zeros((), dtype=tensor.dtype).item(),
    _aten.equal.default: lambda tensor: True,
}
"""Operators whose results the host sees, and what it sees."""


class FakeCuda(TorchDispatchMode):
    """Sends what concerns CUDA to fake tensors.

    Attributes:
        launches: Operators that launch a kernel or copy, by name.
        waits: Where the host waited for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: list[str] = []
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def wait(self, what: str) -> None:
        """Note where the host waits."""
        frames = [frame for frame in traceback.extract_stack() if "/engine/" in frame.filename]
        self.waits.append(f"{what} at {frames[-1].filename}:{frames[-1].lineno}" if frames else what)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = tree_leaves((args, kwargs))
        if not any(isinstance(value, FakeTensor) or _is_cuda(value) for value in given):
            return _on_cpu(func, args, kwargs)
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if _is_composite(func):  # its parts are what is launched
            with self:
                return func.decompose(*args, **kwargs)
        if func in _READS:
            self.wait(str(func))
            return _READS[func](args[0])
        is_async = bool(kwargs.get("non_blocking") or (func is _aten.copy_.default and args[2:3] == (True,)))
        if func is _aten._to_copy.default and torch.device(kwargs.get("device") or "cuda").type == "cpu":
            self._copy(is_async)
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            self._copy(is_async)
            assert args[0].shape == args[1].shape
            return args[0].zero_()
        check_types(func, args, kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
        with self._fakes:
            results = func(*args, **kwargs)
        if any(_is_real(value) and value.dim() for value in given):  # others are refused
            self._copy(is_async)
        elif not (func.is_view or func in _ALLOCATIONS or _is_empty(results)):
            self.launches[str(func)] += 1
        return results

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fakes.from_tensor(tensor)

    def _copy(self, is_async: bool) -> None:
        """Count a copy from or to the host."""
        self.launches["copy from or to the host"] += 1
        if not is_async:
            self.wait("a copy")


class WithIndex(TorchFunctionMode):
    """Names the device "cuda" by its index; without CUDA there is nothing to ask which one is meant."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _with_index(value) for name, value in (kwargs or {}).items()}
        return func(*map(_with_index, args), **kwargs)


def _with_index(value: Any) -> Any:
    return CUDA if isinstance(value, str | torch.device) and str(value) == CUDA.type else value


def _is_cuda(value: object) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _is_real(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _is_empty(results: object) -> bool:
    return isinstance(results, torch.Tensor) and results.numel() == 0


def _on_cpu(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """There is no memory to be pinned where there is no CUDA."""
    if func in (_aten.pin_memory.default, _aten._pin_memory.default):
        return args[0]
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return func(*args, **kwargs)


@contextlib.contextmanager
def device_guard() -> Iterator[None]:
    """Let torch switch to CUDA devices, which does nothing, if it was built without CUDA and would fail."""
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    guards = (ctypes.c_void_p * (_CUDA_TYPE + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[_CUDA_TYPE]
    guards[_CUDA_TYPE] = before or guards[_CPU_TYPE]  # that of the CPU does nothing
    torch._C._ensureCUDADeviceGuardSet()  # the same, if torch was built with CUDA and there is no GPU
    try:
        yield
    finally:
        guards[_CUDA_TYPE] = before


def address(tensor: torch.Tensor) -> int:
    """An address with the alignment that the tensor has within its memory."""
    return _BASE_ADDRESS + tensor.storage_offset() * tensor.element_size()
