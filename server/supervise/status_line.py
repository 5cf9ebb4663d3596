"""Draws the terminal of `weft serve`: log lines, and below them one status line, redrawn in place.

Runs as a process of its own, the only one that writes to the terminal: the supervisor and its children log into a pipe,
which ends when the last of them ends. So lines never mix, the terminal needs no restoring, and the supervisor need not
poll. Counters come from the status pages of all engines together; they are never asked.

`python -m weft.server.supervise.status_line STATUS_PAGE...`, with the pipe as standard input.
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
from collections.abc import Iterator, Sequence

import msgspec

from weft.engine.wire.messages import STATUS_NAME
from weft.engine.wire.status_page import Status, StatusPage
from weft.server.supervise.spawn import python_command
from weft.server.text.shield import strip_controls

DRAW_EVERY_S = 0.5
RATE_OVER_S = 2.0
"""Rates are averages over this time, so that they are steady enough to read."""
_END_S = 5.0
"""Longest wait for the last lines at the end; reached only if another process holds the pipe."""
_BAR_WIDTH = 20

_LOG_LINE = re.compile(r"(\d\d:\d\d:\d\d) (\w+) +([\w ]+): (.*)")
_STYLES = {"INFO": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "31"}
_CLEAR = "\r\x1b[K"


def is_wanted(log_format: str) -> bool:
    """Whether the log is text and goes to a terminal that can redraw a line."""
    return log_format == "text" and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextlib.contextmanager
def shown(folders: Sequence[pathlib.Path]) -> Iterator[None]:
    """Send the output of this process and its children through the status line, until all of them have ended.

    Args:
        folders: Those of the engines.
    """
    source, sink = os.pipe()
    terminal = os.dup(2)
    command = python_command("weft.server.supervise.status_line", *(str(folder / STATUS_NAME) for folder in folders))
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
        except subprocess.TimeoutExpired:  # another process holds the pipe
            drawing.kill()
            drawing.wait()


class Readings:
    """The latest readings of the status page, and the line made from them."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Status]] = deque()

    def add(self, now: float, status: Status) -> None:
        """Add a reading at the time `now`, in seconds. A new engine drops the readings of the one before it."""
        if self._readings and self._readings[-1][1].epoch_id != status.epoch_id:
            self._readings.clear()
        self._readings.append((now, status))
        while len(self._readings) > 2 and self._readings[1][0] <= now - RATE_OVER_S:
            self._readings.popleft()

    def describe(self) -> list[str]:
        """The parts of the line, the most important first."""
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


def together(statuses: Sequence[Status]) -> Status:
    """The sums over all engines that have written; ready if all of these are."""
    written = [status for status in statuses if status.epoch_id] or [Status()]
    numbers = [name for name in Status.__struct_fields__ if not isinstance(getattr(written[0], name), bytes)]
    sums = Status(**{name: sum(getattr(each, name) for each in written) for name in numbers})
    return msgspec.structs.replace(sums, is_ready=min(each.is_ready for each in written))


def fit(parts: list[str], columns: int) -> str:
    """Join as many parts as fit into `columns`; the last column stays free."""
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(part) + 3 >= columns:
            break
        line += f" | {part}"
    return line[: columns - 1]


def paint(line: str, *, has_colour: bool) -> str:
    """Shorten and colour a log line: INFO keeps time and message, other levels keep everything."""
    line = strip_controls(line)
    if not (match := _LOG_LINE.fullmatch(line)):
        return line
    moment, level, _, message = match.groups()
    head = moment if level == "INFO" else line.removesuffix(message).rstrip()
    style = _STYLES.get(level, "") if has_colour else ""
    return f"\x1b[{style}m{head}\x1b[0m {message}" if style else f"{head} {message}"


class _Terminal:
    """Writes log lines, and the status line below them."""

    def __init__(self) -> None:
        self._has_colour = not os.environ.get("NO_COLOR")
        self._drawn = ""
        self._columns = 0

    def log(self, lines: list[bytes]) -> None:
        """Put lines above the status line."""
        texts = [paint(line.decode("utf-8", "replace"), has_colour=self._has_colour) for line in lines]
        self._write(_CLEAR + "\n".join([*texts, self._drawn]))

    def draw(self, parts: list[str]) -> None:
        """Show these parts, unless the line would be the same."""
        columns = os.get_terminal_size(1).columns or 80  # some terminals say 0
        line = fit(parts, columns)
        if (line, columns) != (self._drawn, self._columns):
            wrapped = max(len(self._drawn) - 1, 0) // columns  # a terminal that grew narrower wraps what stands there
            self._drawn, self._columns = line, columns
            self._write("\x1b[A" * wrapped + "\r\x1b[J" + line)

    def _write(self, text: str) -> None:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()


def main(page_paths: Sequence[str]) -> int:
    """Show what arrives on standard input until it ends."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
        signal.signal(signum, signal.SIG_IGN)  # only the end of the pipe ends it: a full pipe would stop the engine
    pages, readings, terminal = [StatusPage(path) for path in page_paths], Readings(), _Terminal()
    pending, due_time = b"", 0.0
    while True:
        now = time.monotonic()
        if now >= due_time:
            due_time = now + DRAW_EVERY_S
            readings.add(now, together([page.read() for page in pages]))
            terminal.draw(readings.describe())
        if not select.select([0], [], [], max(due_time - time.monotonic(), 0.0))[0]:
            continue
        piece = os.read(0, 65536)
        *lines, pending = (pending + piece).split(b"\n")
        if not piece:
            terminal.draw([""])
            terminal.log([pending] if pending else [])
            return 0
        if lines:
            terminal.log(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
