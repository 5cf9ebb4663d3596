"""LoRA adapters as both sides know them: a name, a folder, and what its files held when the name was given to them.

A server process sends all three with every request, so an engine needs no table of names, and a new one knows as much
as the one before it. Imports neither side.
"""

import hashlib
import pathlib
import re
from collections.abc import Collection
from stat import S_ISREG

import msgspec

from weft.engine.shared.errors import ModelError

MAX_ADAPTERS = 1000
"""Most adapters of all models together."""
MAX_LORAS = 256
"""Most slots of a model."""
MAX_FOLDER_CHARS = 4096
_FILES = ("adapter_config.json", "adapter_model.safetensors")
_MAX_HEADER_BYTES = 100_000_000
"""As in safetensors: eight bytes with the size of a header in JSON come before it."""
_OWN_MODULE = re.compile(rb'"(?![^"]*(?:lora_|base_layer))[^"]+\.weight":')
"""In the header, the name of a weight that is part of no low-rank adapter."""


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter.

    Attributes:
        name: What clients call it.
        folder: Absolute.
        content: A digest of what the files hold, wherever they are. Cached prefixes are those of one content.
        has_modules: Whether it has whole modules of its own, and not A and B alone.
    """

    name: str
    folder: str
    content: str
    has_modules: bool = False


def adapter_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of the adapter in a folder, none of which is opened.

    Raises:
        ModelError: One is missing.
    """
    files = [folder / name for name in _FILES]
    try:
        for file in files:
            if not S_ISREG(file.stat().st_mode):  # to read a pipe would take for ever
                raise ModelError(f"{file} is no regular file")
    except FileNotFoundError:
        raise ModelError(f"no {file.name} in {folder}" if folder.is_dir() else f"no such folder: {folder}") from None
    except (OSError, ValueError) as error:  # a name that is too long, or with a zero in it
        raise _unreadable(folder, error) from None
    return files


def find_adapter(name: str, folder: pathlib.Path) -> Adapter:
    """The adapter in a folder as it is now. Reads its files whole.

    Raises:
        ModelError: There is none.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        files = adapter_files(folder)
        for path in files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        with files[-1].open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES))
    except OSError as error:
        raise _unreadable(folder, error) from None
    return Adapter(name, str(folder), digest.hexdigest(), _OWN_MODULE.search(header) is not None)


def _unreadable(folder: pathlib.Path, error: Exception) -> ModelError:
    return ModelError(f"{folder} cannot be read: {getattr(error, 'strerror', None) or error}")


class AdapterUse(msgspec.Struct, frozen=True):
    """Names of adapters, sorted: of requests that run, of those that wait, and of what is in the slots."""

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()

    def pack(self, size: int) -> bytes:
        """The names in at most size bytes. Each list is cut between two names if it takes more than a third."""
        lists = (self.running, self.waiting, self.resident)
        return b"\n".join(_joined(names, size // 3 - 1) for names in lists)


def unpack(data: bytes) -> AdapterUse:
    """What `AdapterUse.pack` made; zeros behind it are ignored. Of half-written bytes, whatever they say."""
    lists = data.partition(b"\0")[0].decode("utf-8", "replace").split("\n")
    return AdapterUse(*(tuple(filter(None, names.split(","))) for names in lists[:3]))


def _joined(names: Collection[str], size: int) -> bytes:
    """Names with commas between them."""
    data = ",".join(names).encode()
    return data if len(data) <= size else data[: size + 1].rpartition(b",")[0]
