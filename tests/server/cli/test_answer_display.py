import io

import pytest
from rich.console import Console

from tests.pseudo_terminal import Screen
from weft.server.cli.display import LiveDisplay, PlainDisplay, finished_length


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\ntwo\n\nthree", "one\n\ntwo\n\n"),
        ("- one\n\n  more of it", ""),
        ("- one\n\n  more\n\nnew", "- one\n\n  more\n\n"),
        ("```\na\n\nb", ""),
        ("```py\na\n\nb\n~~~\n```\n\nnew", "```py\na\n\nb\n~~~\n```\n\n"),
    ],
)
def test_what_more_text_cannot_change_is_finished(text: str, finished: str) -> None:
    assert text[: finished_length(text)] == finished


def shown(pieces: list[tuple[str, bool]], height: int = 10) -> tuple[list[str], str]:
    """The screen after an answer came in pieces (text, is_reasoning), and what was written to it."""
    file = io.StringIO()
    display = LiveDisplay(Console(file=file, force_terminal=True, width=40, height=height, color_system="standard"))
    for text, is_reasoning in pieces:
        display.add(text, is_reasoning=is_reasoning)
    display.close()
    screen = Screen()
    assert screen.feed(file.getvalue().replace("\n", "\r\n")) == ""
    return screen.lines, file.getvalue()


def test_markdown_is_rendered_and_what_scrolled_away_is_there_once() -> None:
    text = "".join(f"Line *{i}* of it.\n\n" for i in range(30)) + "```\nx = 1\n\ny = 2\n```\n\nEnd <b>now</b>."
    lines, raw = shown([(text[i : i + 7], False) for i in range(0, len(text), 7)])
    paragraphs = [line for i in range(30) for line in (f"Line {i} of it.", "")]
    assert lines[:66] == [*paragraphs, " x = 1", "", " y = 2", "", "End <b>now</b>.", ""]
    assert "\x1b[3m" in raw  # emphasis
    assert raw.endswith("\x1b[?25h\r")  # the cursor is back


def test_reasoning_is_dim_and_apart() -> None:
    lines, raw = shown([("Let me", True), (" see.", True), ("It is ", False), ("4.", False)])
    assert [line for line in lines if line.strip()] == ["Let me see.", "It is 4."]
    assert "\x1b[2mLet me see.\x1b[0m" in raw


def test_a_link_is_no_escape_sequence() -> None:
    lines, raw = shown([("[here](http://example.com/x)", False)])
    assert "\x1b]8" not in raw
    assert "http://example.com/x" in lines[0]


def test_plain_is_the_content_alone(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay()
    display.add("Hm", is_reasoning=True)
    display.add("*4")
    display.add(".*")
    display.close()
    assert capsys.readouterr().out == "*4.*\n"
