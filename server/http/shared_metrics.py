"""Metrics that the server processes share through files, so that `/metrics` answers the same from any of them.

Owns room for the files: the client library maps them, and a page that finds no room on a full disk kills the process.
Where there is no room, a process keeps its metrics to itself and says so.
"""

import contextlib
import logging
import os
import pathlib
from typing import Final

from prometheus_client import values

FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Where the client library looks for the folder."""

_RESERVED_BYTES: Final = {"counter": 1 << 14, "histogram": 1 << 17}
"""By kind of metric; what the names and labels take several times over. The library writes into files that it finds."""

logger = logging.getLogger(__name__)


def share_metrics(folder: pathlib.Path) -> None:
    """Put the metrics that this process makes from now on into a folder; once a process, before the first metric."""
    files = {folder / f"{kind}_{os.getpid()}.db": size for kind, size in _RESERVED_BYTES.items()}
    try:
        for path, size in files.items():
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        for path in files:
            with contextlib.suppress(OSError):
                path.unlink()
        logger.warning("/metrics has no other server process's numbers: no room in %s (%s)", folder, error.strerror)
        return
    os.environ[FOLDER_VARIABLE] = str(folder)
    values.ValueClass = values.MultiProcessValue()  # type: ignore[no-untyped-call]
