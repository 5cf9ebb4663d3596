"""Opens what keeps evicted blocks, as the options ask: rows in the host's memory and a folder of files.

A folder serves one model: another model, layout, or precision has other bytes, and so another name. Engines that share
a folder may have the model on different machines, so its name then depends on what the files of the model hold, not on
when they were written. Folders of other models that nobody has used for a week are removed.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from weft.engine.cache.block_files import BlockFiles, file_bytes
from weft.engine.offload.block_bytes import BlockBytes
from weft.engine.offload.offload_tier import OffloadTier
from weft.engine.shared.errors import ModelError
from weft.engine.shared.memory import format_size
from weft.engine.shared.messages import EngineOptions
from weft.engine.shared.model_files import describe

_UNUSED_S = 7 * 86400.0
_NAME_BYTES = 16
_WEIGHTS = ("*.safetensors", "*.bin", "*.json")
_HUB_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Names of files in the hub's cache: digests of what they hold."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A tier, and the key of block hashes that it goes with; None for a random one."""

    tier: OffloadTier
    hash_key: bytes | None


def open_tier(options: EngineOptions, blocks: BlockBytes, facts: Sequence[object]) -> Opened | None:
    """Open the tier, or None if none is asked for.

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
            raise ModelError(
                f"{name} must be at least {format_size(least)}, which a block takes, got {format_size(given)}"
            )
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
