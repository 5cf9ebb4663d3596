"""A lock on a model of the library, which processes of all servers that share its folder heed."""

import contextlib
import fcntl
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from weft.server.library.download import LibraryError

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


@contextlib.contextmanager
def held(file: Path, name: str, *, waits: bool = True) -> Iterator[None]:
    """Hold the lock; the kernel gives it back when a process ends, however it does.

    Raises:
        LibraryError: Another process holds it and this one does not wait, or the folder cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("w")
    except OSError as error:
        raise LibraryError(f"{name}: the library cannot be written: {error}") from None
    with lock:
        is_told = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waits:
                    raise LibraryError(f"{name} is being fetched by another process") from None
                if not is_told:
                    logger.warning("Another process is fetching %s; waiting for it", name)
                is_told = True
                time.sleep(_LOOK_S)
        yield
