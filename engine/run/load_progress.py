"""Tells how far the weights are: at once on the status page, which a terminal shows, and now and then in the log."""

import logging
import time
from dataclasses import replace

from weft.engine.shared.status_page import StatusPage

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0


class LoadProgress:
    """Call it with bytes done and bytes in all."""

    def __init__(self, page: StatusPage) -> None:
        self._page = page
        self._logged = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Note done of total bytes."""
        now = time.monotonic()
        self._page.write(replace(self._page.read(), progress_time=now, loaded_bytes=done, total_bytes=total))
        if now - self._logged >= _LOG_EVERY_S:
            self._logged = now
            logger.info("loading weights: %d of %d MB", done // 1_000_000, total // 1_000_000)
