'''The terminal of `weft chat`: shows an answer while it arrives, and reads the user's messages.

An answer is Markdown and dimmed reasoning on a terminal, and only the content elsewhere. On a terminal a complete
paragraph is printed once, and only the unfinished one is redrawn. So an answer may be longer than the screen and can be
scrolled back.

Messages are typed with line editing and a history. A backslash at the end of a line continues the message on the next
line. A message that begins with """ ends with """.
'''

import contextlib
import json
import os
import pathlib
import readline
import sys

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from weft.engine.wire.machine import user_folder

_DRAWN_PER_S = 15
"""Redraws of the unfinished paragraph; enough for words to appear smoothly."""

_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
"""Like rich's own parser, except that HTML stays as text; rich would drop it."""


class PlainDisplay:
    """Writes the content unchanged, without reasoning."""

    def __init__(self) -> None:
        self._has_written = False

    def add(self, text: str, *, is_reasoning: bool = False) -> None:
        """Write content."""
        if not is_reasoning:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._has_written = True

    def close(self) -> None:
        """End the line."""
        if self._has_written:
            print(flush=True)


class LiveDisplay:
    """Renders Markdown on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tail = ""
        self._is_reasoning = False
        self._has_printed = False
        self._live = Live(console=console, get_renderable=self._bottom, transient=True, refresh_per_second=_DRAWN_PER_S)
        self._live.start()

    def add(self, text: str, *, is_reasoning: bool = False) -> None:
        """Show more text. Complete paragraphs are printed for good."""
        if is_reasoning != self._is_reasoning:
            self._print(self._tail)
            self._tail, self._is_reasoning = "", is_reasoning
        self._tail += text
        length = finished_length(self._tail)
        finished, self._tail = self._tail[:length], self._tail[length:]
        self._print(finished)

    def close(self) -> None:
        """Print the rest and restore the cursor."""
        tail, self._tail = self._tail, ""
        self._print(tail)
        self._live.stop()

    def _print(self, text: str) -> None:
        if text.strip():
            if self._has_printed:
                self._console.print()
            self._console.print(_Lines(self._render(text)), end="")
            self._has_printed = True

    def _bottom(self) -> RenderableType:
        return _Lines(self._render(self._tail), self._console.height - 1)

    def _render(self, text: str) -> RenderableType:
        if self._is_reasoning:
            return Text(text.strip("\n"), style="dim")
        markdown = Markdown("", code_theme="ansi_dark", hyperlinks=False)
        markdown.parsed = _MARKDOWN.parse(text)
        return markdown


class _Lines:
    """The last lines of a renderable, without the blanks that rich adds around it and a user would copy."""

    def __init__(self, content: RenderableType, max_lines: int = sys.maxsize) -> None:
        self._content = content
        self._max_lines = max_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [_strip_end(line) for line in console.render_lines(self._content, options, pad=False)]
        filled = [number for number, line in enumerate(lines) if line] or [0]
        for line in lines[filled[0] : filled[-1] + 1][-self._max_lines :]:
            yield from line
            yield Segment.line()


def _strip_end(line: list[Segment]) -> list[Segment]:
    while line and not line[-1].text.strip():
        line = line[:-1]
    return [*line[:-1], *(Segment(last.text.rstrip(), last.style) for last in line[-1:])]


def finished_length(text: str) -> int:
    """Number of characters whose rendering more text cannot change.

    They end at the last blank line outside fenced code that is followed by a line without indentation.
    """
    length = position = blank = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        if not fence and line == "\n":
            blank = position + 1
        elif blank:
            length, blank = (blank if not line[0].isspace() else length), 0
        mark = line.strip()[:3]
        if mark in ("```", "~~~") and fence in ("", mark):
            fence = "" if fence else mark
        position += len(line)
    return length


MAX_HISTORY = 1000
QUOTES = '"""'
_MORE = ". "


def history_path() -> pathlib.Path:
    """The history file."""
    return user_folder("XDG_STATE_HOME", ".local", "state") / "chat_history"


class LineInput:
    """Input from the keyboard. Works without a history if its file cannot be read or written.

    The history is a file with one JSON string per message, which only this user can read.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        readline.set_auto_history(False)  # the history keeps messages, not lines
        if os.environ.get("TERM", "dumb") != "dumb":
            readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines become one message
        with contextlib.suppress(OSError, ValueError):
            lines = path.read_text(encoding="utf-8").splitlines()
            if len(lines) > 2 * MAX_HISTORY:
                path.write_text("".join(f"{line}\n" for line in lines[-MAX_HISTORY:]), encoding="utf-8")
            for line in lines[-MAX_HISTORY:]:
                readline.add_history(str(json.loads(line)))

    def read(self, prompt: str) -> str:
        """Read one message of one or more lines, and add it to the history.

        Raises:
            EOFError: Ctrl-D on an empty line.
            KeyboardInterrupt: Ctrl-C.
        """
        message = _read_message(prompt if sys.stdout.isatty() else "").encode("utf-8", "replace").decode()
        if message.strip():
            self._keep(message)
        return message

    def _keep(self, message: str) -> None:
        readline.add_history(message)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with open(file, "w", encoding="utf-8") as history:
                history.write(f"{json.dumps(message)}\n")


def _read_message(prompt: str) -> str:
    more = _MORE if prompt else ""
    line = input(prompt)
    if line.lstrip().startswith(QUOTES):
        text = line.lstrip().removeprefix(QUOTES)
        with contextlib.suppress(EOFError):  # Ctrl-D also ends a block
            while not text.rstrip().endswith(QUOTES):
                text += "\n" + input(more)
        return text.rstrip().removesuffix(QUOTES).strip("\n")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input(more)
    return line
