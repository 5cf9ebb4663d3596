"""Opens what keeps evicted blocks, as the options ask: rows in the host's memory and a folder of files.

A folder serves one model: another model, layout, or precision has other bytes, and so another name. Folders of other
models that nobody has used for a week are removed.
"""

import contextlib
import fcntl
import hashlib
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.engine.offload.block_bytes import BlockBytes
from weft.engine.offload.block_files import BlockFiles
from weft.engine.offload.offload_tier import OffloadTier
from weft.engine.shared.errors import ModelError
from weft.engine.shared.messages import EngineOptions

_UNUSED_S = 7 * 86400.0
_NAME_BYTES = 16
_WEIGHTS = ("*.safetensors", "*.bin", "*.json")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A tier, and the key of block hashes that it goes with; None for a random one."""

    tier: OffloadTier
    hash_key: bytes | None


def open_tier(options: EngineOptions, blocks: BlockBytes, facts: Sequence[object], *, is_cuda: bool) -> Opened | None:
    """Open the tier, or None if none is asked for.

    Args:
        facts: Beside the files of the model and the options, what the bytes of a block depend on.

    Raises:
        ModelError: The options are not possible here.
    """
    if options.kv_offload and not is_cuda:
        raise ModelError(
            "kv_offload keeps blocks in the host's memory, where the KV cache of a CPU is anyway: raise "
            "kv_cache_memory, or keep them on disk with kv_offload_dir"
        )
    if options.kv_offload_dir is None:
        return Opened(OffloadTier(blocks, options.kv_offload, None), None) if options.kv_offload else None
    name = _fingerprint(Path(options.model), [*facts, *blocks.row_bytes])
    root = Path(options.kv_offload_dir)
    try:
        files = BlockFiles(root / name, options.kv_offload_disk)
        key = files.hash_key()
        _remove_unused(root, name)
    except BlockingIOError:
        raise ModelError(f"kv_offload_dir {root} is in use by another engine of this model") from None
    except OSError as error:
        raise ModelError(f"kv_offload_dir {root} cannot be used: {error.strerror}") from None
    return Opened(OffloadTier(blocks, options.kv_offload, files), key)


def _fingerprint(model: Path, facts: Sequence[object]) -> str:
    digest = hashlib.blake2b(digest_size=_NAME_BYTES)
    for path in sorted(path for pattern in _WEIGHTS for path in model.glob(pattern)):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    digest.update(repr(facts).encode())
    return digest.hexdigest()


def _remove_unused(root: Path, name: str) -> None:
    for folder in root.iterdir():
        lock = folder / "lock"
        if folder.name == name or not lock.is_file() or time.time() - lock.stat().st_mtime < _UNUSED_S:
            continue
        with contextlib.suppress(BlockingIOError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            logger.info("removing %s, which has been unused for a week", folder)
            shutil.rmtree(folder)
