"""Keeps what was settled at start-up in a file, so that the next start need not compare and time kernels again.

The file is `weft/settled.json` in the user's cache folder. It only saves time: one that is missing, broken or foreign
counts as empty, and one that cannot be written is left alone. A writer replaces the whole file, so a reader never sees
half of one. Of two that write at once, one may lose its entry, which is then measured again.
"""

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from weft.engine.kernels.cpu import library
from weft.engine.shared.machine_facts import Settled, driver_version, package_version

logger = logging.getLogger(__name__)

_KERNELS = Path(library.__file__).parents[1]

# Packages that kernels come from, or are compiled with.
_PACKAGES = ("weft", "torch", "triton", "flash_attn_3", "flashinfer-python", "flashinfer-jit-cache")

# Entries in the file; the oldest go first.
_MAX_NUM_ENTRIES = 256


class _Entry(msgspec.Struct, frozen=True):
    machine: str
    settled: Settled


class SettledFile:
    """The choices that were kept for one machine."""

    def __init__(self, path: Path | None, machine: str) -> None:
        """Read and write at path, None for nowhere; machine is the text of `machine_text`."""
        self._path = path
        self._machine = machine

    def find(self, component: str, shapes: str, names: Sequence[str]) -> Settled | None:
        """What was settled for a component with the same shapes and candidates; None if nothing was."""
        for settled in self.of_this_machine():
            if (settled.component, settled.shapes, settled.names) == (component, shapes, tuple(names)):
                return settled if settled.chosen in names else None
        return None

    def of_this_machine(self) -> tuple[Settled, ...]:
        """All choices that hold on this machine."""
        return tuple(entry.settled for entry in self._read() if entry.machine == self._machine)

    def keep(self, settled: Settled) -> None:
        """Add a choice, in place of an older one for the same component and shapes."""
        if self._path is None:
            return
        key = self._machine, settled.component, settled.shapes
        others = [e for e in self._read() if (e.machine, e.settled.component, e.settled.shapes) != key]
        entries = [*others, _Entry(self._machine, settled)][-_MAX_NUM_ENTRIES:]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self._path, msgspec.json.format(msgspec.json.encode(entries)))
        except OSError as error:
            logger.info("the choice of kernels is not kept: %s cannot be written: %s", self._path, error.strerror)

    def _read(self) -> list[_Entry]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[_Entry]) if self._path else []
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.info("the choices of kernels in %s are ignored: %s", self._path, error)
            return []


def _replace(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def open_for(device: torch.device) -> SettledFile:
    """The file in the cache folder, for this machine's device."""
    return SettledFile(default_path(), machine_text(device))


def default_path() -> Path | None:
    """Where the XDG Base Directory Specification places the file; None for a user without a home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        try:
            folder = Path.home() / ".cache"
        except RuntimeError:
            return None
    return folder / "weft" / "settled.json"


def machine_text(device: torch.device) -> str:
    """Text that changes when a kernel may compute something else, or in another time: device, driver and versions."""
    if device.type == "cuda":
        named = f"{torch.cuda.get_device_name(device)}, driver {driver_version() or 'unknown'}"
    else:
        named = library.cpu_name()
    versions = [f"{name} {version}" for name in _PACKAGES if (version := package_version(name))]
    return ", ".join([named, *versions, f"kernels {_digest()}"])


@functools.cache
def _digest() -> str:
    """Changes with every change of Weft's kernels, which its version does not."""
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(_KERNELS.rglob("*")):
        if file.suffix in (".py", ".so"):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()
