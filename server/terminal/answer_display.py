"""Shows an answer while it comes: Markdown on a terminal, with reasoning dimmed; the bare content elsewhere.

On a terminal whole paragraphs are printed for good and only the unfinished one is drawn again and again, so an answer
may be longer than the screen, and is there to scroll back to.
"""

import sys

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

_DRAWN_PER_S = 15
"""Times that the unfinished paragraph is drawn; words come without jerks."""

_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
"""The parser that rich brings along and uses, but HTML stays as text; rich would leave it out."""


class PlainDisplay:
    """The content alone, as it is."""

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
    """Markdown on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tail = ""
        self._is_reasoning = False
        self._has_printed = False
        self._live = Live(console=console, get_renderable=self._bottom, transient=True, refresh_per_second=_DRAWN_PER_S)
        self._live.start()

    def add(self, text: str, *, is_reasoning: bool = False) -> None:
        """Show more text; paragraphs that are complete stay."""
        if is_reasoning != self._is_reasoning:
            self._print(self._tail)
            self._tail, self._is_reasoning = "", is_reasoning
        length = finished_length(self._tail + text)
        finished, self._tail = (self._tail + text)[:length], (self._tail + text)[length:]
        self._print(finished)

    def close(self) -> None:
        """Print what is left and give the cursor back."""
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
    """The last lines of something, without the blanks around it that rich adds: they would be copied, too."""

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
    """Length of the beginning of text that more text cannot change.

    It ends at the last blank line, outside of fenced code, that a line without indentation follows.
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
