"""How many connections a server process holds, and what its log says of those that it refused.

Of the file limit, connections take a share. A few more are let in for one request each, of which only probes are
served: a full server still tells how it is. When these are too many, the oldest gives way to the newest.
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
"""What a hard limit of "unlimited" counts as; the kernel allows no more by default."""
LOG_EVERY_S = 60.0

_log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise this process's soft limit on open files to the hard one; returns it."""
    soft, hard = (
        MAX_NUM_FILES if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    limit = max(soft, min(hard, MAX_NUM_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


class Connection(Protocol):
    """What is counted."""

    def drop(self) -> None:
        """Close at once."""


class Connections:
    """The open connections of one process; each of them counts itself in and out."""

    def __init__(self, settings: Settings, max_num_files: int) -> None:
        """Allow what the settings say, within the share of max_num_files."""
        self.settings = settings
        share = max(1, int(max_num_files * SHARE_OF_FILES))
        self.max_num = min(settings.max_connections or share, share)
        self._max_num_extra = max(1, min(MAX_NUM_EXTRA, max_num_files // 16))
        self._regular: set[Connection] = set()
        self._extra: dict[Connection, None] = {}  # the oldest first
        self._num_refused = 0
        self._next_log_time = 0.0

    def open(self, connection: Connection) -> bool:
        """Count in; False for one that came beyond the limit, and may only ask for a probe."""
        if len(self._regular) < self.max_num:
            self._regular.add(connection)
            return True
        if len(self._extra) >= self._max_num_extra:
            oldest = next(iter(self._extra))
            del self._extra[oldest]
            oldest.drop()
        self._extra[connection] = None
        return False

    def close(self, connection: Connection) -> None:
        """Count out."""
        self._regular.discard(connection)
        self._extra.pop(connection, None)

    def note_refused(self, error: ApiError) -> None:
        """Say in the log that requests are refused, now and then: who sends them must not fill it."""
        self._num_refused += 1
        now = time.monotonic()
        if now >= self._next_log_time:
            fields = {"num_requests": self._num_refused, "last": error.message}
            _log.warning("Refused what broke HTTP or its limits", extra=fields)
            self._num_refused, self._next_log_time = 0, now + LOG_EVERY_S
