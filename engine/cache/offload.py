"""Keeps evicted blocks in the memory of the host and on disk, and brings them back: the `BlockTier` of an engine.

A block is copied to the host's memory when it is evicted, and from there to disk if there is a folder. Blocks on their
way to disk are found like any others. What comes faster than the disk takes it is dropped, so the engine never waits
for it.

A folder serves one model: another model, layout, or precision has other bytes, and so another name. Engines that share
a folder may have the model on different machines, so its name then depends on what the files of the model hold, not on
when they were written. Folders of other models that nobody has used for a week are removed.
"""

import contextlib
import fcntl
import hashlib
import logging
import math
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from typing_extensions import override

from weft.engine.cache.block_bytes import BlockBytes
from weft.engine.cache.block_files import BlockFiles, Key, file_bytes
from weft.engine.cache.tier import BlockTier, CachedBlock, LoadStoppedError
from weft.engine.wire.errors import ModelError
from weft.engine.wire.machine import format_size
from weft.engine.wire.messages import EngineOptions
from weft.engine.wire.status_page import Counters
from weft.engine.wire.tokenizer_files import describe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Row:
    """A block in the host's memory; `copied` is None on the CPU, where a copy is made at once."""

    num_bytes: int
    data: torch.Tensor
    copied: torch.cuda.Event | None

    def wait(self) -> torch.Tensor:
        """The bytes, once they are there."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.data


class _Rows:
    """Rows by key and the bytes that they take together; the least recently used first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[Key, _Row] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def has_room(self, num_bytes: int) -> bool:
        return self._num_bytes + num_bytes <= self._max_bytes

    def make_room(self, num_bytes: int) -> bool:
        """Forget the least recently used until num_bytes fit; returns whether they ever can."""
        while self._rows and not self.has_room(num_bytes):
            self._num_bytes -= self._rows.popitem(last=False)[1].num_bytes
        return self.has_room(num_bytes)

    def get(self, key: Key) -> _Row | None:
        """Look a row up, which is then the most recently used one."""
        if key in self._rows:
            self._rows.move_to_end(key)
        return self._rows.get(key)

    def add(self, key: Key, row: _Row) -> None:
        self.pop(key)
        self._rows[key] = row
        self._num_bytes += row.num_bytes

    def pop(self, key: Key) -> None:
        row = self._rows.pop(key, None)
        self._num_bytes -= row.num_bytes if row else 0


_GAIN = 0.3
"""How fast the measured rates follow new measurements."""

_HALVING_S = 60.0
"""Without loads, predicted times are halved every so many seconds: a disk that once was slow is tried again."""


class _Rate:
    """Seconds that a byte takes, as measured."""

    def __init__(self) -> None:
        self._seconds, self._measured = 0.0, 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Follow a measurement."""
        now = seconds / num_bytes
        known = self.seconds
        self._seconds = known + _GAIN * (now - known) if known else now
        self._measured = time.monotonic()

    @property
    def seconds(self) -> float:
        """Predicted seconds of the next byte; 0 before the first measurement."""
        return self._seconds * math.exp2(-(time.monotonic() - self._measured) / _HALVING_S)


_BUFFER_BYTES = 256 << 20
"""Most bytes on their way to disk, where the memory of the host is not a tier of its own."""

_MAX_MISSES = 64
"""Blocks of a prompt that may be missing before it is no longer looked for: some kinds of cache keep but a few."""

_PAUSE_S = 10.0
"""After a failed write the disk is left alone for so long. What is evicted meanwhile is not written."""


class OffloadTier(BlockTier):
    """Owner of the rows in the host's memory and of the folder.

    One thread writes, one loads, and one looks for what others wrote. The engine's thread only touches tables and
    copies one block at a time.

    Attributes:
        counters: What it has done so far.
    """

    def __init__(
        self, blocks: BlockBytes, host_bytes: int, files: BlockFiles | None, *, always_loads: bool = False
    ) -> None:
        """Keep up to host_bytes in memory, and all that is evicted in files; None for no disk.

        Args:
            always_loads: Load also what would be computed in less time.
        """
        self._always_loads = always_loads
        self._blocks = blocks
        self._files = files
        self._kept, self._unwritten = _Rows(host_bytes), _Rows(_BUFFER_BYTES if files else 0)
        self._lock = threading.Lock()
        self._host_rate, self._disk_rate = _Rate(), _Rate()
        self._rest_until = 0.0
        self.counters = Counters()
        self._loader, self._writer = ThreadPoolExecutor(1, "kv-load"), ThreadPoolExecutor(1, "kv-store")
        self._seeker = ThreadPoolExecutor(1, "kv-seek")
        if files is not None:
            self._writer.submit(self._on_disk, files.list_files)

    @property
    def num_host_blocks(self) -> int:
        """Blocks that are kept in the host's memory."""
        return len(self._kept)

    @property
    def num_disk_blocks(self) -> int:
        """Blocks on disk."""
        return self._files.num_blocks if self._files else 0

    def close(self) -> None:
        """Wait for the loads and writes that have begun."""
        for thread in (self._seeker, self._loader, self._writer):
            thread.shutdown()
        if self._files is not None:
            self._files.close()

    @override
    def keep(self, evicted: CachedBlock) -> None:
        key, num_bytes = (evicted.group, evicted.block_hash), self._blocks.host_bytes(evicted.group)
        with self._lock:
            is_on_disk = self._files is not None and self._files.has(key)
            is_rare = not is_on_disk and self._unwritten.get(key) is None
            is_written = is_rare and time.monotonic() >= self._rest_until and self._unwritten.has_room(num_bytes)
            row = self._kept.get(key)
            if row is not None and not is_written:
                return
            is_kept = row is not None or self._kept.make_room(num_bytes)
            if not is_kept and not is_written:
                self.counters.kv_offload_dropped_blocks += is_rare
                return
            row = row or _Row(num_bytes, *self._blocks.read(evicted.group, evicted.block))
            if is_kept:
                self._kept.add(key, row)
            if is_written:
                self._unwritten.add(key, row)
        self.counters.kv_offload_kept_blocks += 1
        if is_written:
            self._writer.submit(self._on_disk, partial(self._store, key, row))

    @override
    def has(self, group: int, block_hash: bytes) -> bool:
        key = group, block_hash
        return self._find(key) is not None or (self._files is not None and self._files.has(key))

    @override
    def seek(self, hashes: Sequence[bytes]) -> "Future[None] | None":
        is_shared = self._files is not None and self._files.is_shared
        return self._seeker.submit(self._on_disk, partial(self._seek, list(hashes))) if is_shared else None

    @override
    def has_room(self, group: int) -> bool:
        return self._unwritten.has_room(self._blocks.host_bytes(group)) or time.monotonic() < self._rest_until

    @override
    def flush(self) -> "Future[None]":
        return self._writer.submit(lambda: None)

    @override
    def load_seconds(self, blocks: Sequence[tuple[int, bytes]]) -> float:
        if self._always_loads:
            return 0.0
        host, disk = self._host_rate.seconds, self._disk_rate.seconds
        return sum(self._blocks.row_bytes[key[0]] * (host if self._find(key) else disk) for key in blocks)

    @override
    def load(self, blocks: Sequence[CachedBlock]) -> "Future[None]":
        return self._loader.submit(self._load, list(blocks), self._blocks.mark())

    @override
    def forget(self, group: int, block_hash: bytes) -> None:
        key = group, block_hash
        with self._lock:
            self._kept.pop(key)
            self._unwritten.pop(key)
            if self._files is not None and self._files.drop(key):
                self._writer.submit(self._on_disk, partial(self._files.remove, key))

    def _find(self, key: Key) -> _Row | None:
        with self._lock:
            return self._kept.get(key) or self._unwritten.get(key)

    # --- on the threads -------------------------------------------------------------------------------------------

    def _seek(self, hashes: list[bytes]) -> None:
        assert self._files is not None
        num_missing = 0
        for block_hash in hashes:
            keys = [(group, block_hash) for group in range(len(self._blocks.row_bytes))]
            look = self._files.look if num_missing <= _MAX_MISSES else self._files.lose
            num_missing += not any([look(key) for key in keys])

    def _load(self, blocks: list[CachedBlock], behind: torch.cuda.Event | None) -> None:
        for number, (group, block_hash, block) in enumerate(blocks):
            try:
                self._load_block((group, block_hash), block, behind)
            except Exception as error:
                self.counters.kv_offload_faults += 1
                logger.warning("evicted blocks could not be loaded, and are computed again: %s", error)
                raise LoadStoppedError(number) from error

    def _load_block(self, key: Key, block: int, behind: torch.cuda.Event | None) -> None:
        began, num_bytes = time.perf_counter(), self._blocks.row_bytes[key[0]]
        row = self._find(key)
        self._blocks.write(key[0], block, row.wait() if row else self._read(key, num_bytes), behind)
        (self._host_rate if row else self._disk_rate).add(num_bytes, time.perf_counter() - began)
        if row:
            self.counters.kv_offload_host_loads += 1
        else:
            self.counters.kv_offload_disk_loads += 1

    def _read(self, key: Key, num_bytes: int) -> torch.Tensor:
        if self._files is None:
            raise LookupError("the host's memory has them no longer")
        return self._files.read(key, num_bytes)

    def _store(self, key: Key, row: _Row) -> None:
        assert self._files is not None
        try:
            if time.monotonic() < self._rest_until or self._unwritten.get(key) is not row:
                return
            size = self._files.write(key, row.wait())
            with self._lock:
                is_forgotten = self._unwritten.get(key) is not row
                if size and not is_forgotten:
                    self._files.add(key, size)
            if is_forgotten:
                self._files.remove(key)
        finally:
            with self._lock:
                if self._unwritten.get(key) is row:
                    self._unwritten.pop(key)

    def _on_disk(self, job: Callable[[], object]) -> None:
        try:
            job()
        except OSError as error:
            self.counters.kv_offload_faults += 1
            self._rest_until = time.monotonic() + _PAUSE_S
            logger.warning("evicted blocks are not written for %g s: %s", _PAUSE_S, error)


_UNUSED_S = 7 * 86400.0
_NAME_BYTES = 16
_WEIGHTS = ("*.safetensors", "*.bin", "*.json")
_HUB_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Names of files in the cache of the Hugging Face hub: digests of what they hold."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A tier, and the key of block hashes that it goes with; None for a random one."""

    tier: OffloadTier
    hash_key: bytes | None


def open_tier(options: EngineOptions, blocks: BlockBytes, facts: Sequence[object]) -> Opened | None:
    """Open the tier that the options ask for; None if they ask for none. Removes folders that are no longer used.

    Args:
        facts: Beside the files of the model and the options, what the bytes of a block depend on.

    Raises:
        ModelError: The folder cannot be used, or not a single block would be kept.
    """
    for name, least in (
        ("kv_offload", max(map(blocks.host_bytes, range(len(blocks.row_bytes))))),
        ("kv_offload_disk", max(map(file_bytes, blocks.row_bytes))),
    ):
        if 0 < (given := getattr(options, name)) < least:
            message = f"{name} must be at least {format_size(least)}, which a block takes, got {format_size(given)}"
            raise ModelError(message)
    if options.kv_offload_dir is None:
        return Opened(OffloadTier(blocks, options.kv_offload, None), None) if options.kv_offload else None
    is_shared = options.kv_role != "none"
    root = Path(options.kv_offload_dir).expanduser()
    try:
        name = _fingerprint(Path(options.model), [*facts, *blocks.row_bytes], is_shared=is_shared)
        files = BlockFiles(root / name, options.kv_offload_disk, is_shared=is_shared)
        key = files.hash_key()
        _remove_unused(root, name)
    except BlockingIOError:
        advice = "" if is_shared else "; kv_role lets several share it"
        raise ModelError(f"kv_offload_dir {root} is in use by another engine of this model{advice}") from None
    except OSError as error:
        raise ModelError(f"kv_offload_dir {root} cannot be used: {error.strerror}") from None
    if is_shared:
        logger.info("sharing %s as %s: engines that share blocks name the same folder", root / name, options.kv_role)
    return Opened(OffloadTier(blocks, options.kv_offload, files, always_loads=options.kv_role == "decode"), key)


def _fingerprint(model: Path, facts: Sequence[object], *, is_shared: bool) -> str:
    """The name of the folder for a model and these facts."""
    config, elsewhere = describe(model / "config.json")
    inside = sorted(path for pattern in _WEIGHTS for path in model.glob(pattern) if path.name != "config.json")
    paths, digest = [*inside, *elsewhere], hashlib.blake2b(config, digest_size=_NAME_BYTES)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, content in zip(paths, pool.map(_content if is_shared else _version, paths), strict=True):
            digest.update(f"{path.name} {content}\n".encode())
    digest.update(repr(facts).encode())
    return digest.hexdigest()


def _version(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _content(path: Path) -> str:
    """A digest of what a file holds: its name in the hub's cache, which is one, or else it is read."""
    blob = path.resolve()
    if blob.parent.name == "blobs" and _HUB_BLOB.fullmatch(blob.name):
        return blob.name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_unused(root: Path, name: str) -> None:
    for folder in root.iterdir():
        with contextlib.suppress(OSError):  # it is in use, another user's, or something else
            used_time = max((folder / each).stat().st_mtime for each in ("lock", "."))  # of a start, of a write
            if folder.name == name or time.time() - used_time < _UNUSED_S:
                continue
            with (folder / "lock").open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                logger.info("removing %s, which has been unused for a week", folder)
                shutil.rmtree(folder)
