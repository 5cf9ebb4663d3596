"""The runtime folder, in which the processes of one `weft serve` meet: sockets, status page, metrics. Never a secret.

Owns where it is made, its lock and its end. The supervisor holds a lock on it as long as it lives, also where it is
killed: so a folder with the mark that nobody has locked was left by a dead one, and the next supervisor removes it.
Cleaners of temporary folders leave a locked one alone.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from weft.engine.shared import limits
from weft.engine.shared.messages import SOCKET_NAME, STATUS_NAME
from weft.engine.shared.status_page import StatusPage
from weft.server.settings import StartError

METRICS_NAME = "metrics"
"""Folder of the metrics that server processes share."""
MARK_NAME = "supervisor"
"""An empty file, made once the folder is locked."""
MIN_FREE_BYTES = 1 << 20
"""What the processes put there takes some hundred kB."""

_PREFIX = "weft-"
_MAX_SOCKET_PATH = 107  # sun_path, less the closing zero


@contextlib.contextmanager
def runtime_folder() -> Iterator[pathlib.Path]:
    """A fresh folder for this user alone, with an empty status page in it; removed at the end.

    Raises:
        StartError: There is no place with room for it.
    """
    faults = []
    for parent in runtime_parents():
        sweep(parent)
        try:
            path, lock = _make(parent)
        except OSError as error:
            faults.append(f"{parent}: {limits.explain(error) or error.strerror or error}")
        else:
            break
    else:
        raise StartError(f"no room for a runtime folder ({'; '.join(faults)}); set XDG_RUNTIME_DIR to one that has")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def runtime_parents() -> list[str]:
    """Where runtime folders may be made, the best first: paths in them are short enough for a socket."""
    parent = os.environ.get("XDG_RUNTIME_DIR", "")
    too_long = len(f"{parent}/{_PREFIX}12345678/{SOCKET_NAME}".encode()) > _MAX_SOCKET_PATH
    return ["/tmp"] if too_long or not os.access(parent, os.W_OK | os.X_OK) else [parent, "/tmp"]


def is_there(folder: pathlib.Path) -> bool:
    """Whether nobody has removed a folder in use: a logout takes XDG_RUNTIME_DIR with it."""
    return (folder / MARK_NAME).exists()


def sweep(parent: str) -> None:
    """Remove this user's runtime folders whose supervisors are dead."""
    for folder in pathlib.Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, no folder, or in use
            lock = _lock(folder)
            try:
                if os.fstat(lock).st_uid == os.getuid() and is_there(folder):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _make(parent: str) -> tuple[pathlib.Path, int]:
    """The new folder and its lock."""
    usage = os.statvfs(parent)
    if usage.f_bavail * usage.f_frsize < MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, f"less than {MIN_FREE_BYTES >> 20} MiB are left")
    path = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 700
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, path, ignore_errors=True)
        lock = _lock(path)
        undo.callback(os.close, lock)
        (path / METRICS_NAME).mkdir(mode=0o700)
        StatusPage(path / STATUS_NAME).close()
        (path / MARK_NAME).touch(mode=0o600)
        undo.pop_all()
    return path, lock


def _lock(folder: pathlib.Path) -> int:
    """Lock a folder; the number of the file that holds the lock. Raises OSError if another process has it."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file
