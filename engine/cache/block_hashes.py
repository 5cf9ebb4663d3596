"""Names the blocks of prompts by keyed, chained 128-bit hashes: equal hashes mean equal tokens from the first one on.

The key is random and lives as long as the process, or as the folder that keeps evicted blocks. So nobody outside can
make two prompts collide.
"""

import hashlib
import os
from array import array
from collections.abc import Sequence

from weft.engine.request import Request
from weft.engine.shared.adapters import Adapter

_HASH_BYTES = 16


class BlockHashes:
    """Owner of the key."""

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        """Take a key, or draw one; a block has block_size tokens."""
        self._block_size = block_size
        self._key = key or os.urandom(_HASH_BYTES)

    def seed(self, cache_salt: str, adapter: Adapter | None, extra_hash_keys: Sequence[str]) -> bytes:
        """First parent of the chain of hashes; differs when any of the arguments does."""
        named = ("", "") if adapter is None else (f"{adapter.name},{adapter.content}", "a")
        parts = [cache_salt, *named, *extra_hash_keys]
        digest = hashlib.blake2b(key=self._key, digest_size=_HASH_BYTES)
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()

    def extend(self, request: Request, num_blocks: int) -> None:
        """Hash the next num_blocks blocks of a request."""
        hashes, size = request.block_hashes, self._block_size
        parent, start = hashes[-1] if hashes else request.cache_seed, len(hashes) * size
        data = array("I", request.token_ids[start : start + num_blocks * size]).tobytes()
        step = size * array("I").itemsize
        for offset in range(0, num_blocks * step, step):
            block = data[offset : offset + step]
            parent = hashlib.blake2b(parent + block, key=self._key, digest_size=_HASH_BYTES).digest()
            hashes.append(parent)
