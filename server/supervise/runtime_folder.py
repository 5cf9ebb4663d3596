"""The runtime folder, in which the processes of one `weft serve` meet: sockets, status page, metrics. Never a secret.

Owns its place, its lock and its end. The supervisor locks the folder as long as it lives, and the kernel unlocks it
even after a SIGKILL. So a marked folder without a lock was left by a dead supervisor, and the next one removes it.
Cleaners of temporary folders leave a locked folder alone.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator

from weft.engine.wire import errors as limits
from weft.engine.wire.messages import SOCKET_NAME, STATUS_NAME
from weft.engine.wire.status_page import StatusPage
from weft.server.model_entry import MAX_MODELS
from weft.server.models.fleet import ASKS_NAME
from weft.server.settings import StartError
from weft.server.store.store import TEMPORARY_MARK, open_database

METRICS_NAME = "metrics"
"""Folder of the metrics that server processes share."""
MARK_NAME = "supervisor"
"""An empty file, made once the folder is locked."""
MIN_FREE_BYTES = 1 << 20
"""The processes write some hundred kB there."""

_PREFIX = "weft-"
_MAX_SOCKET_PATH = 107  # sun_path without the closing zero


@contextlib.contextmanager
def runtime_folder(num_engines: int = 1) -> Iterator[pathlib.Path]:
    """A new folder that only this user can read; removed at the end. Each engine has one in it, with an empty page.

    Raises:
        StartError: No place has room for it.
    """
    faults = []
    for parent in runtime_parents():
        sweep(parent)
        with contextlib.ExitStack() as stack:
            try:
                path = stack.enter_context(_folder_in(parent))
                (path / METRICS_NAME).mkdir(mode=0o700)
                (path / ASKS_NAME).mkdir(mode=0o700)
                for index in range(num_engines):
                    engine_folder(path, index).mkdir(mode=0o700)
                    StatusPage(engine_folder(path, index) / STATUS_NAME).close()
            except OSError as error:
                faults.append(f"{parent}: {limits.explain(error) or error.strerror or error}")
            else:
                yield path
                return
    raise StartError(f"no room for a runtime folder ({'; '.join(faults)}); set XDG_RUNTIME_DIR to a folder with room")


def engine_folder(runtime_dir: pathlib.Path, index: int) -> pathlib.Path:
    """The folder of an engine: its socket, its status page, what crashed it. `index`: among the models."""
    return runtime_dir / str(index)


def runtime_parents() -> list[str]:
    """Where runtime folders may be made, the best place first. Paths in them are short enough for a socket."""
    parent = os.environ.get("XDG_RUNTIME_DIR", "")
    too_long = len(f"{parent}/{_PREFIX}12345678/{MAX_MODELS}/{SOCKET_NAME}".encode()) > _MAX_SOCKET_PATH
    return ["/tmp"] if too_long or not os.access(parent, os.W_OK | os.X_OK) else [parent, "/tmp"]


def is_there(folder: pathlib.Path) -> bool:
    """False if a folder in use was removed, for example XDG_RUNTIME_DIR at a logout."""
    return (folder / MARK_NAME).exists()


def sweep(parent: str) -> None:
    """Remove this user's runtime folders whose supervisors are dead."""
    for folder in pathlib.Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(folder) as lock:  # fails if another user's, a file, or in use
            if os.fstat(lock).st_uid == os.getuid() and is_there(folder):
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def data_folder(data_dir: str | None) -> Iterator[pathlib.Path]:
    """The folder of files, batches and stored responses. With None it is a new one, removed at the end.

    A new one is not in the runtime folder, which may be in memory.

    Raises:
        StartError: It cannot be made or written, or a later Weft made it.
    """
    with contextlib.ExitStack() as stack:
        folder = None if data_dir is None else pathlib.Path(data_dir).expanduser().absolute()
        try:
            if folder is None:
                sweep(tempfile.gettempdir())
                folder = stack.enter_context(_folder_in(tempfile.gettempdir()))
                (folder / TEMPORARY_MARK).touch(mode=0o600)
            open_database(folder, is_durable=False).close()
        except (OSError, sqlite3.Error) as error:
            fault = getattr(error, "strerror", None) or error
            raise StartError(f"data_dir: {folder or tempfile.gettempdir()} cannot be used: {fault}") from None
        yield folder


@contextlib.contextmanager
def _folder_in(parent: str) -> Iterator[pathlib.Path]:
    if shutil.disk_usage(parent).free < MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, f"less than {MIN_FREE_BYTES >> 20} MiB are left")
    path = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 700
    try:
        with _locked(path, waits=True):  # for one that sweeps, and looks at it
            (path / MARK_NAME).touch(mode=0o600)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: pathlib.Path, *, waits: bool = False) -> Iterator[int]:
    """Hold the lock on a folder, as its file descriptor. Raises OSError, or waits, if another process holds it."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield file
    finally:
        os.close(file)
