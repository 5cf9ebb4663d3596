"""The terminal of `weft serve`: log lines, and below them one line that says what the engine does, redrawn in place.

A process of its own, and the only one that writes to the terminal: the supervisor and its children write their log into
a pipe, which ends when the last of them does. So no line is garbled, nothing of the terminal has to be restored, and
the supervisor need not poll. Counters come from the status page; the engine is never asked.

`python -m weft.server.run.status_line STATUS_PAGE`, with the pipe as standard input.
"""

import contextlib
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator

from weft.engine.shared.status_page import Status, StatusPage
from weft.server.run.child import python_command
from weft.server.terminal.text import strip_controls

DRAW_EVERY_S = 0.5
RATE_OVER_S = 2.0
"""Rates are over this time: long enough to be read."""
_END_S = 5.0
"""The last lines of a busy machine take a while; where nobody else holds the pipe, this is never waited for in full."""
_BAR_WIDTH = 20

_LOG_LINE = re.compile(r"(\d\d:\d\d:\d\d) (\w+) +([\w ]+): (.*)")
_STYLES = {"INFO": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "31"}
_CLEAR = "\r\x1b[K"


def is_wanted(log_format: str) -> bool:
    """Whether the log goes to a terminal that can redraw a line, for people to read."""
    return log_format == "text" and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextlib.contextmanager
def shown(page: pathlib.Path) -> Iterator[None]:
    """Let what this process and its children write go through the status line, until all of them are done."""
    source, sink = os.pipe()
    terminal = os.dup(2)
    command = python_command("weft.server.run.status_line", str(page))
    drawing = subprocess.Popen(command, stdin=source, stdout=terminal, stderr=terminal)
    os.close(source)
    for number in (1, 2):
        if os.isatty(number):
            os.dup2(sink, number)
    os.close(sink)
    try:
        yield
    finally:
        sys.stdout.flush()
        for number in (1, 2):
            os.dup2(terminal, number)
        os.close(terminal)
        try:
            drawing.wait(_END_S)
        except subprocess.TimeoutExpired:  # somebody else holds the pipe
            drawing.kill()
            drawing.wait()


class Readings:
    """The latest readings of the status page, and what they say together."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Status]] = deque()

    def add(self, now: float, status: Status) -> None:
        """Take another reading at the time now, in seconds; those of an engine that is gone are forgotten."""
        if self._readings and self._readings[-1][1].epoch_id != status.epoch_id:
            self._readings.clear()
        self._readings.append((now, status))
        while len(self._readings) > 2 and self._readings[1][0] <= now - RATE_OVER_S:
            self._readings.popleft()

    def describe(self) -> list[str]:
        """The line in parts, the most important first."""
        (then, first), (now, last) = self._readings[0], self._readings[-1]
        if not last.is_ready and last.loaded_bytes < last.total_bytes:
            share = last.loaded_bytes / last.total_bytes
            bar = ("#" * int(share * _BAR_WIDTH)).ljust(_BAR_WIDTH, ".")
            return [f"loading weights [{bar}] {share:.0%} of {last.total_bytes / 1e6:,.0f} MB"]
        if not last.is_ready:
            return ["the engine warms up" if last.total_bytes else "the engine starts"]
        seconds = max(now - then, 1e-9)
        decode = (last.generation_tokens - first.generation_tokens) / seconds
        prefill = (last.prompt_tokens - first.prompt_tokens) / seconds
        cache = f"KV cache {last.num_used_blocks / max(last.num_blocks, 1):.0%}"
        if not last.has_work and not decode and not prefill:
            return ["idle", cache, "Press Ctrl-C to stop"]
        counts = f"{last.num_requests_running} running, {last.num_requests_waiting} waiting"
        return [counts, f"decode {decode:,.0f} tokens/s", f"prefill {prefill:,.0f} tokens/s", cache]


def fit(parts: list[str], columns: int) -> str:
    """As many parts as fit into a terminal of so many columns; the last column stays free."""
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(part) + 3 >= columns:
            break
        line += f" | {part}"
    return line[: columns - 1]


def paint(line: str, *, has_colour: bool) -> str:
    """A log line for people: what is ordinary shows time and message, the rest keeps its level and process."""
    line = strip_controls(line)
    match = _LOG_LINE.fullmatch(line)
    if match is None:
        return line
    moment, level, _, message = match.groups()
    head = moment if level == "INFO" else line.removesuffix(message).rstrip()
    style = _STYLES.get(level, "") if has_colour else ""
    return f"\x1b[{style}m{head}\x1b[0m {message}" if style else f"{head} {message}"


class _Terminal:
    """Writes log lines and the status line below them."""

    def __init__(self) -> None:
        self._has_colour = not os.environ.get("NO_COLOR")
        self._drawn = ""
        self._columns = 0

    def log(self, lines: list[str]) -> None:
        """Put lines above the status line."""
        painted = "".join(f"{paint(line, has_colour=self._has_colour)}\n" for line in lines)
        self._write(f"{_CLEAR}{painted}{self._drawn}")

    def draw(self, parts: list[str]) -> None:
        """Show these parts, unless they are what is shown."""
        columns = os.get_terminal_size(1).columns or 80  # some say 0
        line = fit(parts, columns)
        if (line, columns) != (self._drawn, self._columns):
            self._drawn, self._columns = line, columns
            self._write(_CLEAR + line)

    def _write(self, text: str) -> None:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()


def main(page_path: pathlib.Path) -> int:
    """Show what comes until nothing more can."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
        signal.signal(signum, signal.SIG_IGN)  # the pipe's end says when it is over; a full one would stop the engine
    page, readings, terminal = StatusPage(page_path), Readings(), _Terminal()
    pending, due_time = b"", 0.0
    while True:
        now = time.monotonic()
        if now >= due_time:
            due_time = now + DRAW_EVERY_S
            readings.add(now, page.read())
            terminal.draw(readings.describe())
        if not select.select([0], [], [], max(due_time - time.monotonic(), 0.0))[0]:
            continue
        piece = os.read(0, 65536)
        *lines, pending = (pending + piece).split(b"\n")
        if not piece:
            terminal.draw([""])
            terminal.log([pending.decode("utf-8", "replace")] if pending else [])
            return 0
        if lines:
            terminal.log([line.decode("utf-8", "replace") for line in lines])


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
