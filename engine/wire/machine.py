"""What processes tell each other of their machine: versions, devices, chosen kernels, and the memory of models.

It also has what keeps a process small and quick: rare garbage collection, and the return of freed memory to the system.
Imports no torch.
"""

import ctypes
import gc
import importlib.metadata
import os
import re
import sys
from pathlib import Path

import msgspec

_DRIVER = Path("/proc/driver/nvidia/version")


def package_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """The version of NVIDIA's driver; None without one."""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text()) if _DRIVER.exists() else None
    return found[0] if found else None


class CudaDevice(msgspec.Struct, frozen=True):
    """A GPU as torch sees it; compute_capability is, for example, "9.0"."""

    name: str
    compute_capability: str
    free_bytes: int


class Verdict(msgspec.Struct, frozen=True):
    """How a candidate did when something was chosen for its component.

    Attributes:
        seconds: Of one run; None if it was not timed, since there was nothing to choose or it cannot be used.
        error: Its distance from the reference; None if it was not compared, or gave no numbers.
        fault: Why it cannot be chosen; empty if it can.
    """

    candidate: str
    seconds: float | None = None
    error: float | None = None
    fault: str = ""


class KernelChoice(msgspec.Struct, frozen=True):
    """What was chosen for a component, and why.

    Attributes:
        shapes: Text of the sizes for which it holds.
        names: What there was to choose from.
        verdicts: Of the candidates that were compared.
        num_starts: At how many starts they were; a time is the least of all.
    """

    component: str
    shapes: str
    names: tuple[str, ...]
    chosen: str
    verdicts: tuple[Verdict, ...]
    num_starts: int = 1

    def summary(self) -> str:
        """The choice, then the other candidates, each with its time or the reason against it."""
        others = [verdict for verdict in self.verdicts if verdict.candidate != self.chosen]
        first = [verdict for verdict in self.verdicts if verdict.candidate == self.chosen]
        return "; ".join([*(map(_judged, first) if first else [self.chosen]), *map(_judged, others)])


def _judged(verdict: Verdict) -> str:
    if verdict.fault:
        return f"{verdict.candidate}: {verdict.fault}"
    return verdict.candidate if verdict.seconds is None else f"{verdict.candidate} {verdict.seconds * 1e3:.3f} ms"


class MachineFacts(msgspec.Struct, frozen=True):
    """Facts of a machine that only the engine's side can tell, for `weft doctor`.

    Attributes:
        cuda_version: CUDA version that torch was built for; None for a CPU build.
        free_bytes: Memory of the host that can be allocated now.
        compiled: Instruction sets that native kernels were compiled for, best first.
        native: The instruction set that is used here; None when torch's own operations are used.
        settled: What earlier starts chose on this machine.
    """

    cuda_version: str | None
    cuda_devices: tuple[CudaDevice, ...]
    free_bytes: int
    compiled: tuple[str, ...]
    native: str | None
    settled: tuple[KernelChoice, ...] = ()


SHARE_OF_FREE_MEMORY = {"cpu": 0.4, "cuda": 0.92}
"""KV caches take at most this share of the memory that weights and activations leave, unless told otherwise. The rest
is for other programs on a CPU, and for CUDA graphs and fragmentation on a GPU."""

MAX_CPU_CACHE_BYTES = 4 << 30
"""A CPU decodes too slowly to use more."""


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A model on its device, before it is loaded. On a CPU these are the bytes of all ranks together.

    Attributes:
        fault: Why no plan can be made; the other fields then say nothing.
        device: cpu or cuda.
        num_sharing: Ranks that share the device; each has its part of every number of bytes.
        free_bytes: What the device had to give when this was planned.
        process_bytes: Taken by an engine process itself.
        least_kv_bytes: A KV cache with which the model can be served.
        kv_bytes: The KV cache of the model alone on its device, or what the options say.
        is_kv_fixed: Whether the options say it.
        num_requests: Requests of max_model_len that run at once with kv_bytes.
        host_bytes: What its experts take of the host's memory beside the device.
    """

    fault: str = ""
    device: str = "cpu"
    num_sharing: int = 1
    free_bytes: int = 0
    process_bytes: int = 0
    weights_bytes: int = 0
    activations_bytes: int = 0
    least_kv_bytes: int = 0
    kv_bytes: int = 0
    is_kv_fixed: bool = False
    max_model_len: int = 0
    num_requests: int = 0
    host_bytes: int = 0


def cache_bytes(left_bytes: int, device: str) -> int:
    """Bytes for KV caches, of those that weights and activations leave on a device."""
    share = int(left_bytes * SHARE_OF_FREE_MEMORY[device])
    return min(share, MAX_CPU_CACHE_BYTES) if device == "cpu" else share


def user_folder(variable: str, *usual: str) -> Path:
    """Weft's own folder for cache, data or state, as the XDG Base Directory Specification places it.

    Args:
        variable: Of the environment, such as XDG_CACHE_HOME.
        usual: The place in the home folder where it is not set.

    Raises:
        RuntimeError: The user has no home.
    """
    given = os.environ.get(variable, "")
    return (Path(given) if os.path.isabs(given) else Path.home().joinpath(*usual)) / "weft"


def format_size(num_bytes: float) -> str:
    """A printable size, such as 1.2 GB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.2f} GB"


GC_THRESHOLD = 10_000
"""New objects before a collection. At Python's 700, hundreds of streams (about 300 objects each in a server process)
cause a full collection every second."""


def collect_rarely() -> None:
    """Freeze start-up objects; collect rarely. Call it once everything is loaded.

    Python's garbage collector then skips these objects. A collection stops all streams. A full one over the objects of
    torch alone takes 80 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def return_free_memory() -> None:
    """Return freed memory to the system, which glibc would keep."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent from other C libraries
        if trim is not None:
            trim(0)
