"""A driver below Triton's own just-in-time path: arguments are bound, kernels are specialised and compiled, none runs.

Triton asks its driver for a target, loads binaries through it and launches with it. This driver counts instead. Each
driver has a device number of its own, so that one does not find what another has compiled.
"""

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from typing_extensions import override

HOPPER = 90
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, HOPPER: 227 << 10, 100: 227 << 10}
"""Compute capability, 90 for 9.0 -> shared memory that a program may have."""

_device_numbers = itertools.count(1000)


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with the constants, types and alignments that it is compiled for.

    Attributes:
        function: The function under `triton.jit`.
        constants: Values of its constexpr arguments, by name.
        options: Triton's, such as num_warps.
        data: The same as JSON, for `function.preload` in any process that has this driver.
        compiled: None if it was only recorded.
    """

    function: Any
    constants: dict[str, Any]
    options: dict[str, Any]
    data: str
    compiled: Any = None

    @property
    def name(self) -> str:
        return str(self.function.__name__)

    def __str__(self) -> str:
        constants = ", ".join(f"{name}={value}" for name, value in self.constants.items())
        told = json.loads(self.data)
        types = ", ".join(kind for kind in told["signature"].values() if kind != "constexpr")
        alignments = [path for path, kinds in zip(told["attrs_keys"], told["attrs_vals"], strict=True) if kinds]
        return f"{self.name}({constants}) of {types}, {len(alignments)} aligned, {self.options['num_warps']} warps"


@dataclass
class Record:
    """What has been launched, by kernel, and compiled."""

    launches: Counter[str] = field(default_factory=Counter)
    variants: list[Variant] = field(default_factory=list)


class FakeDriver(DriverBase):
    """Stands in for Triton's CUDA driver, see `active`. If it compiles nothing, variants are recorded alone."""

    def __init__(self, capability: int = HOPPER, *, compiles: bool = True) -> None:
        self.record = Record()
        self.capability = capability
        self.utils = _Utils(SHARED_BYTES[capability])
        self._compiles = compiles
        self._device = next(_device_numbers)

    @property
    def launcher_cls(self) -> Any:
        return lambda source, metadata: self._launcher(source.fn.__name__)

    @classmethod
    @override
    def is_active(cls) -> bool:
        return True

    @override
    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    @override
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    @override
    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    @override
    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing runs")

    @contextlib.contextmanager
    def active(self) -> Iterator[Record]:
        """Be Triton's driver for a while."""
        drivers, runtime = triton.runtime.driver, triton.knobs.runtime
        before = drivers._active
        hooks = runtime.jit_cache_hook, runtime.jit_post_compile_hook
        drivers.set_active(self)
        if self._compiles:
            runtime.jit_post_compile_hook = self._note
        else:
            runtime.jit_cache_hook = self._note
        try:
            yield self.record
        finally:
            drivers._active = before
            runtime.jit_cache_hook, runtime.jit_post_compile_hook = hooks

    def _note(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Record a variant; returns whether Triton should neither compile it nor launch it this time."""
        function = fn.jit_function
        kernels = function.device_caches[self._device][0]
        compiled = kernels.get(key)
        constants = {function.arg_names[path[0]]: value for path, value in compile["constants"].items()}
        data = compile["specialization_data"]
        self.record.variants.append(Variant(function, constants, json.loads(data)["options"], data, compiled))
        if compiled is None:
            kernels[key] = _NotCompiled(self._launcher(function.__name__))
            self.record.launches[function.__name__] += 1
        return compiled is None

    def _launcher(self, name: str) -> Callable[..., None]:
        def launch(*_: Any) -> None:
            self.record.launches[name] += 1

        return launch


@dataclass(frozen=True, slots=True)
class _NotCompiled:
    """What Triton's launch asks of a compiled kernel."""

    run: Callable[..., None]
    function: None = None
    packed_metadata: None = None

    def launch_metadata(self, *_: Any) -> None:
        return None


class _Utils:
    """What Triton's compiled module of the driver does. Triton itself refuses kernels that need more memory."""

    def __init__(self, shared_bytes: int) -> None:
        self._shared_bytes = shared_bytes

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024  # handles, registers and spills, which Triton only keeps, and the most threads

    def unload_module(self, module: int) -> None:
        """There is none."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._shared_bytes, "multiprocessor_count": 132, "warpSize": 32}
