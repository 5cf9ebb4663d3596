"""Shares metrics among server processes through files, so that `/metrics` gives the same answer in each.

Reserves disk space for the files. The client library maps them into memory, and writing to a page without disk space
kills the process. If there is no space, a process does not share its metrics, and logs a warning.
"""

import contextlib
import logging
import os
import pathlib
from typing import Final

from prometheus_client import values

FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable in which the client library looks for the folder."""

_RESERVED_BYTES: Final = {"counter": 1 << 14, "histogram": 1 << 17}
"""Size of the file by kind of metric, several times what names and labels need. The library uses existing files."""

logger = logging.getLogger(__name__)


def share_metrics(folder: pathlib.Path) -> None:
    """Share all metrics that this process creates from now on. Call it once, before the first metric is created."""
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
