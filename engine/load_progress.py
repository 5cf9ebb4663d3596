"""Shows how far the weights are: a bar on a terminal, a line now and then in a log."""

import logging
import sys
import time
from types import TracebackType

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0


class LoadProgress:
    """Call it with bytes done and bytes in all; a context manager around the loading."""

    def __enter__(self) -> "LoadProgress":
        """Start the clock; the bar appears with the first call."""
        self._logged = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console  # imported here: only a terminal needs it
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("weights", total=None)
            self._bar.start()
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show done of total bytes."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._logged >= _LOG_EVERY_S:
            self._logged = time.monotonic()
            logger.info("loading weights: %d of %d MB", done // 1_000_000, total // 1_000_000)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
