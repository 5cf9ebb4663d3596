"""Measures an answer as a client could: until its first event, and from there to its end."""

import time


class Stopwatch:
    """Starts when it is made. Times are in seconds."""

    def __init__(self) -> None:
        self._start_time = time.monotonic()
        self._first_time: float | None = None

    def note_event(self) -> None:
        """There are events; the first ones count."""
        if self._first_time is None:
            self._first_time = time.monotonic()

    def read(self) -> tuple[float, float]:
        """The time until the first event, and the time since then."""
        now = time.monotonic()
        first = now if self._first_time is None else self._first_time
        return first - self._start_time, now - first
