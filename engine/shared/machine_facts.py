"""Facts of a machine: versions, and what the engine's side tells `weft doctor` of devices and settled choices.

Imports no torch.
"""

import importlib.metadata
import re
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
    """How a candidate did when a component was settled.

    Attributes:
        seconds: Of one run; None if it was not timed, since there was nothing to choose or it cannot be used.
        error: Its distance from the reference; None if it was not compared, or gave no numbers.
        fault: Why it cannot be chosen; empty if it can.
    """

    candidate: str
    seconds: float | None = None
    error: float | None = None
    fault: str = ""


class Settled(msgspec.Struct, frozen=True):
    """What was chosen for a component, and why.

    Attributes:
        shapes: Text of the sizes for which it holds.
        names: What there was to choose from.
        verdicts: Of the candidates that were compared.
    """

    component: str
    shapes: str
    names: tuple[str, ...]
    chosen: str
    verdicts: tuple[Verdict, ...]

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
    settled: tuple[Settled, ...] = ()
