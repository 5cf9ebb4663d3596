"""Limits the connections of a server process, and logs refused requests.

Connections may take a share of the file limit. Beyond it a few more are accepted for one request each, and only probes
are served on them, so that a full server can still be monitored. If these are too many, the oldest is closed.
"""

import logging
import resource
import time
from typing import Protocol

from weft.server.errors import ApiError
from weft.server.settings import Settings

SHARE_OF_FILES = 0.75
MAX_NUM_EXTRA = 64
MAX_NUM_FILES = 1 << 20
"""Used for a hard limit of "unlimited"; by default the kernel allows no more."""
LOG_EVERY_S = 60.0

_log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise this process's soft limit on open files to the hard limit, and return it."""
    soft, hard = (
        MAX_NUM_FILES if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    limit = max(soft, min(hard, MAX_NUM_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


class CountedConnection(Protocol):
    """A connection, as far as it is counted."""

    def drop(self) -> None:
        """Close at once."""


class Connections:
    """The open connections of one process. Each counts itself in and out."""

    def __init__(self, settings: Settings, max_num_files: int) -> None:
        """Allow the number in the settings, but at most SHARE_OF_FILES of max_num_files."""
        self.settings = settings
        share = max(1, int(max_num_files * SHARE_OF_FILES))
        self.max_num = min(settings.max_connections or share, share)
        self._max_num_extra = max(1, min(MAX_NUM_EXTRA, max_num_files // 16))
        self._regular: set[CountedConnection] = set()
        self._extra: dict[CountedConnection, None] = {}  # the oldest first
        self._num_refused = 0
        self._next_log_time = 0.0

    def open(self, connection: CountedConnection) -> bool:
        """Count in. False: the limit is reached, and only probes may be served."""
        if len(self._regular) < self.max_num:
            self._regular.add(connection)
            return True
        if len(self._extra) >= self._max_num_extra:
            oldest = next(iter(self._extra))
            del self._extra[oldest]
            oldest.drop()
        self._extra[connection] = None
        return False

    def close(self, connection: CountedConnection) -> None:
        """Count out."""
        self._regular.discard(connection)
        self._extra.pop(connection, None)

    def note_refused(self, error: ApiError) -> None:
        """Log refused requests at most once in LOG_EVERY_S: their sender must not fill the log."""
        self._num_refused += 1
        now = time.monotonic()
        if now >= self._next_log_time:
            fields = {"num_requests": self._num_refused, "last": error.message}
            _log.warning("Refused requests that are malformed or exceed a limit", extra=fields)
            self._num_refused, self._next_log_time = 0, now + LOG_EVERY_S
