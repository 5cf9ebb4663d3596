"""Keeps rows of bytes in files, one for each cached block, in a folder of bounded size that outlives the process.

A file begins with a header that holds a checksum of what it holds and of the block that it is for, so that a torn,
changed or renamed file is never taken for what was written. Files are written under another name and then renamed. When
there is no room, the least recently used go first; the times of the files keep that order for the next start. One
process uses a folder at a time, which a lock ensures, or several share it. These look for files by name, since others
write and remove them, and each lists the folder again after it has written a sixteenth of the limit. So the folder may
exceed the limit by a sixteenth for each writer.

`has`, `add`, `drop` and `num_blocks` return at once, on any thread. The others wait for the disk: `read` and `look` on
any thread, all others on one.
"""

import contextlib
import fcntl
import io
import math
import os
import secrets
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import torch

Key = tuple[int, bytes]
"""Cache group and hash of a block."""

MAX_NUM_FILES = 1 << 18
"""Of small models a folder would hold millions of files: slow to list, and each takes memory here."""

_HEADER = struct.Struct("<8sQI")  # magic and version, length, CRC-32
_MAGIC = b"weftkv\x00\x02"
_KEY_BYTES = 16
_ENDING, _UNFINISHED = ".kv", ".new"
_DISK_UNIT = 4096
"""What a file takes is a multiple of this."""
_SLACK = 1 / 16
"""Share of a shared folder that a process writes before it lists the folder again."""
_ABANDONED_S = 3600.0
"""What others left unfinished in a shared folder is removed after so long."""


class BlockFiles:
    """Owner of one folder, alone or with others.

    Attributes:
        is_shared: Whether other processes may use the folder at the same time.
    """

    def __init__(self, folder: Path, max_bytes: int, *, is_shared: bool = False) -> None:
        """Make the folder and lock it. What it holds is found by `list_files`.

        Raises:
            BlockingIOError: Another process uses it, and one of the two does not share it.
            OSError: It cannot be made or written.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[Key, int] = OrderedDict()  # the least recently used first
        self._used_bytes = 0
        self._doomed: set[Key] = set()  # dropped, and their files not yet removed
        self._lock = threading.Lock()
        self.is_shared = is_shared
        self._unlisted = 0.0  # share of the limit that was written since the folder was listed
        self._unfinished = f".{secrets.token_hex(8)}{_UNFINISHED}"
        self._lock_file = open(folder / "lock", "w+b")  # noqa: SIM115  # held as long as the process lives
        try:
            fcntl.flock(self._lock_file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            self._lock_file.close()
            raise

    def close(self) -> None:
        """Let other processes use the folder."""
        self._lock_file.close()

    def hash_key(self) -> bytes:
        """The secret that the hashes of all blocks here are keyed with; drawn at the first start."""
        with os.fdopen(os.open(self._folder / "key", os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # others may draw one now; the lock is held for a moment
            if len(key := file.read()) != _KEY_BYTES:
                key = os.urandom(_KEY_BYTES)
                file.seek(0)
                file.truncate()
                file.write(key)
                file.flush()
        return key

    @property
    def num_blocks(self) -> int:
        """Blocks that can be read."""
        return len(self._sizes)

    def has(self, key: Key) -> bool:
        """Whether there is such a block."""
        return key in self._sizes

    def list_files(self) -> None:
        """Find the blocks that others left, and remove what they left unfinished and what is over the limit."""
        found: list[tuple[float, Key, int]] = []
        before = time.time() - _ABANDONED_S if self.is_shared else math.inf
        for entry in os.scandir(self._folder):
            key = _key_of(entry.name)
            with contextlib.suppress(FileNotFoundError):
                if key is not None:
                    status = entry.stat()
                    found.append((status.st_mtime, key, _disk_bytes(status.st_size)))
                elif entry.name.endswith(_UNFINISHED) and entry.stat().st_mtime < before:
                    os.unlink(entry.path)
        found.sort()
        with self._lock:
            self._sizes = OrderedDict((key, size) for _, key, size in found if key not in self._doomed)
            self._used_bytes = sum(self._sizes.values())
        self._unlisted = 0.0
        self._remove(self._over_limit(int(self._max_bytes * _SLACK) if self.is_shared else 0))

    def look(self, key: Key) -> bool:
        """Whether there is a file of this block now, whoever wrote it; `has` knows it from then on.

        Raises:
            OSError: The disk is broken.
        """
        try:
            size = self._path(key).stat().st_size
        except FileNotFoundError:
            return self.lose(key)
        if key not in self._doomed:
            self.add(key, _disk_bytes(size))
        return key not in self._doomed

    def lose(self, key: Key) -> bool:
        """Find a block no longer, whether or not there is a file, which stays. Returns False."""
        with self._lock:
            self._used_bytes -= self._sizes.pop(key, 0)
        return False

    def write(self, key: Key, row: torch.Tensor) -> int:
        """Write the file of a block, after the least recently used have made room. `add` lets it be found.

        Args:
            row: (row_bytes,) uint8.

        Returns:
            What it takes on disk; 0 if it is larger than the folder may be.

        Raises:
            OSError: The disk is full or broken. Then nothing is left of the file.
        """
        data = row.numpy().data
        size = file_bytes(len(data))
        if size > self._max_bytes:
            return 0
        self._make_room(size)
        path = self._path(key)
        unfinished = path.with_suffix(self._unfinished)
        try:
            with open(unfinished, "wb", buffering=0) as file:
                file.write(_header(key, data))
                _write_all(file.fileno(), data)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        return size

    def add(self, key: Key, size: int) -> None:
        """Let a block be found whose file takes size bytes."""
        with self._lock:
            self._used_bytes += size - self._sizes.pop(key, 0)
            self._sizes[key] = size

    def read(self, key: Key, row_bytes: int) -> torch.Tensor:
        """Read a block of so many bytes, which is then the most recently used one. On any thread.

        Raises:
            OSError: The file is gone or cannot be read.
            ValueError: It is not what was written.
        """
        path = self._path(key)
        row = torch.empty(row_bytes, dtype=torch.uint8)
        data = row.numpy().data
        with open(path, "rb", buffering=0) as file:
            header = file.read(_HEADER.size)
            num_read = _read_all(file, data)
        if num_read != row_bytes or header != _header(key, data):
            raise ValueError(f"{path} is damaged")
        with contextlib.suppress(OSError):
            os.utime(path)
        with self._lock:
            if key in self._sizes:
                self._sizes.move_to_end(key)
        return row

    def drop(self, key: Key) -> bool:
        """Find a block no longer. Returns whether there is a file to remove with `remove`."""
        with self._lock:
            size = self._sizes.pop(key, None)
            if size is not None:
                self._used_bytes -= size
                self._doomed.add(key)
        return size is not None

    def remove(self, key: Key) -> None:
        """Remove the file of a dropped block."""
        self._path(key).unlink(missing_ok=True)
        self._doomed.discard(key)

    def _make_room(self, size: int) -> None:
        if not self.is_shared:
            self._remove(self._over_limit(size))
            return
        self._unlisted += max(size / self._max_bytes, 1 / MAX_NUM_FILES)
        if self._unlisted > _SLACK:
            self.list_files()

    def _over_limit(self, num_bytes: int) -> Iterator[Key]:
        """The blocks that must go before num_bytes more fit, as dropped ones."""
        is_one_more = num_bytes > 0
        while self._sizes and (
            self._used_bytes + num_bytes > self._max_bytes or len(self._sizes) + is_one_more > MAX_NUM_FILES
        ):
            with self._lock:
                key = next(iter(self._sizes))
            self.drop(key)
            yield key

    def _remove(self, keys: Iterator[Key]) -> None:
        for key in keys:
            self.remove(key)

    def _path(self, key: Key) -> Path:
        group, block_hash = key
        return self._folder / f"{group}-{block_hash.hex()}{_ENDING}"


def file_bytes(row_bytes: int) -> int:
    """What the file of a row takes on disk."""
    return _disk_bytes(_HEADER.size + row_bytes)


def _key_of(name: str) -> Key | None:
    group, _, digest = name.removesuffix(_ENDING).partition("-")
    if not name.endswith(_ENDING) or not group.isdecimal():
        return None
    try:
        return int(group), bytes.fromhex(digest)
    except ValueError:
        return None


def _disk_bytes(size: int) -> int:
    return -(-size // _DISK_UNIT) * _DISK_UNIT


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _read_all(file: io.FileIO, data: memoryview) -> int:
    """Fill data from a file. Returns how many bytes there were."""
    num_read = 0
    while count := file.readinto(data[num_read:]):
        num_read += count
    return num_read


def _header(key: Key, data: memoryview) -> bytes:
    group, block_hash = key
    return _HEADER.pack(_MAGIC, len(data), zlib.crc32(data, zlib.crc32(b"%d %s" % (group, block_hash))))
