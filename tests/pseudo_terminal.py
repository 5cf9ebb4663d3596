"""A terminal for tests: runs a command on a pseudo-terminal and keeps the screen that its user would see."""

import contextlib
import fcntl
import os
import pathlib
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence

TIMEOUT_S = 120.0
"""Of what is waited for; only a failure takes so long."""

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[=>78]|[\r\n\b]|[^\x1b\r\n\b]")


class Screen:
    """Just enough of a terminal: text, returns, cursor up and right, erasing. Lines never leave it."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = self._column = 0

    def feed(self, text: str) -> str:
        """Show text; returns what is incomplete at its end."""
        position = 0
        while match := _TOKEN.match(text, position):
            self._show(match)
            position = match.end()
        return text[position:]

    def _show(self, match: re.Match[str]) -> None:
        count = int(match[1]) if match[1] and match[1].isdecimal() else 0
        line = self.lines[self._row]
        if match[2] == "A":
            self._row = max(self._row - (count or 1), 0)
        elif match[2] == "C":
            self._column += count or 1
        elif match[2] == "D":
            self._column = max(self._column - (count or 1), 0)
        elif match[2] == "K":
            self.lines[self._row] = "" if count == 2 else line[: self._column]
        elif match[2] == "J":
            self.lines[self._row :] = [line[: self._column]]
        elif match[0] == "\r":
            self._column = 0
        elif match[0] == "\b":
            self._column = max(self._column - 1, 0)
        elif match[0] == "\n":
            self._row += 1
            self.lines += [""] * (self._row + 1 - len(self.lines))
        elif match[0].isprintable():
            self.lines[self._row] = line.ljust(self._column)[: self._column] + match[0] + line[self._column + 1 :]
            self._column += 1


def _take_terminal() -> None:
    """In the child."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class PseudoTerminal:
    """A command on a terminal of its own; a context manager that ends it."""

    def __init__(self, command: Sequence[str], *, columns: int = 100, rows: int = 30, **environment: str) -> None:
        self._master, slave = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
            | {"TERM": "xterm-256color"}
            | environment,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        self._slave = slave  # held open, so that what was written last can be read
        self._raw = self._pending = ""
        self._screen = Screen()

    def __enter__(self) -> "PseudoTerminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    @property
    def raw(self) -> str:
        """All bytes that were written, as text."""
        self._read(0.0)
        return self._raw

    @property
    def lines(self) -> list[str]:
        """The screen as it is now, without what is empty at the end."""
        self._read(0.0)
        lines = self._screen.lines.copy()
        while lines and not lines[-1].strip():
            lines.pop()
        return lines

    @property
    def attributes(self) -> list[object]:
        """Modes of the terminal, as `before` has those at the start."""
        return termios.tcgetattr(self._slave)

    def resize(self, columns: int, rows: int = 30) -> None:
        """Change the size, of which the foreground is told."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        """Press keys once the command waits for something: a Ctrl-C that readline is not waiting for is lost."""
        stat = pathlib.Path(f"/proc/{self.process.pid}/stat")
        deadline = time.monotonic() + TIMEOUT_S
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline, "it never waits"
            self._read(0.001)
        os.write(self._master, keys.encode())

    def wait_for(self, claim: str | Callable[[list[str]], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Until a text is on the screen, or a claim about its lines is true."""
        deadline = time.monotonic() + timeout_s
        while not (any(claim in line for line in self.lines) if isinstance(claim, str) else claim(self.lines)):
            assert time.monotonic() < deadline, f"{claim} is not what is seen:\n" + "\n".join(self.lines)
            self._read(0.05)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Until it ends; returns the exit code."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end:\n" + "\n".join(self.lines)
            self._read(0.02)
        return self.process.wait()

    def _read(self, timeout_s: float) -> None:
        while select.select([self._master], [], [], timeout_s)[0]:
            text = os.read(self._master, 65536).decode("utf-8", "replace")
            self._raw += text
            self._pending = self._screen.feed(self._pending + text)
            timeout_s = 0.0
