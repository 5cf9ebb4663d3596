"""The status line, and the process that draws it, on a pseudo-terminal."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from tests.pseudo_terminal import PseudoTerminal
from weft.engine.wire.status_page import Status, StatusPage
from weft.server.supervise import status_line
from weft.server.supervise.status_line import Readings, fit, paint, together

ROOT = pathlib.Path(__file__).parents[3]
IDLE = "idle | KV cache 0% | Press Ctrl-C to stop"

# Writes as a supervisor and its children do: a line for every one that it reads from a named pipe.
WRITER = """
import os, subprocess, sys, pathlib
from weft.server.supervise.status_line import shown
with shown([pathlib.Path(sys.argv[1])]):
    for line in open(sys.argv[2]):
        os.write(1 if "stdout" in line else 2, line.encode().decode("unicode_escape").encode("latin-1"))
print("done")
"""


def described(*readings: tuple[float, Status]) -> list[str]:
    collected = Readings()
    for now, status in readings:
        collected.add(now, status)
    return collected.describe()


def test_rates_are_over_the_last_two_seconds() -> None:
    def reading(now: float, generated: int, prompt: int) -> tuple[float, Status]:
        counts = {"num_requests_running": 2, "num_requests_waiting": 1, "num_blocks": 200, "num_used_blocks": 25}
        return now, Status(1, 1, has_work=1, generation_tokens=generated, prompt_tokens=prompt, **counts)

    parts = described(*(reading(now / 2, 0 if now < 4 else (now - 4) * 500, 9_000) for now in range(9)))
    assert parts == ["2 running, 1 waiting", "decode 1,000 tokens/s", "prefill 0 tokens/s", "KV cache 12%"]


def test_an_engine_that_starts_anew_has_no_rates_yet() -> None:
    dead = Status(epoch_id=1, is_ready=1, has_work=1, generation_tokens=500)
    fresh = Status(epoch_id=2, is_ready=1, has_work=1, generation_tokens=3)
    assert described((0.0, dead), (1.0, fresh))[1] == "decode 0 tokens/s"


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (Status(), "the engine starts"),
        (
            Status(1, loaded_bytes=15 * 10**8, total_bytes=2 * 10**9),
            "loading weights [###############.....] 75% of 2,000 MB",
        ),
        (Status(1, loaded_bytes=5, total_bytes=5), "the engine warms up"),
        (Status(1, is_ready=1, num_blocks=10), IDLE),
    ],
)
def test_the_line_says_what_an_engine_without_work_does(status: Status, line: str) -> None:
    assert fit(described((0.0, status)), 100) == line


def test_a_narrow_terminal_gets_the_first_parts() -> None:
    parts = ["2 running, 1 waiting", "decode 5 tokens/s", "KV cache 3%"]
    assert fit(parts, 80) == "2 running, 1 waiting | decode 5 tokens/s | KV cache 3%"
    assert fit(parts, 54) == "2 running, 1 waiting | decode 5 tokens/s"
    assert fit(parts, 10) == "2 running"


def test_log_lines_are_short_and_safe() -> None:
    info, error = "12:30:05 INFO    engine: model a", "12:30:05 ERROR   server 0: it \x1b[2Jfailed"
    assert paint(info, has_colour=True) == "\x1b[2m12:30:05\x1b[0m model a"
    assert paint(info, has_colour=False) == "12:30:05 model a"
    assert paint(error, has_colour=True) == "\x1b[31m12:30:05 ERROR   server 0:\x1b[0m it [2Jfailed"
    assert paint("weft: error: x", has_colour=True) == "weft: error: x"


@pytest.mark.parametrize(
    ("log_format", "is_terminal", "term", "wanted"),
    [
        ("text", True, "xterm", True),
        ("json", True, "xterm", False),
        ("text", False, "xterm", False),
        ("text", True, "dumb", False),
        ("text", True, None, False),
    ],
)
def test_only_people_at_a_terminal_get_it(
    monkeypatch: pytest.MonkeyPatch, log_format: str, is_terminal: bool, term: str | None, wanted: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.delenv("TERM", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    assert status_line.is_wanted(log_format) is wanted


def test_lines_stand_above_the_status_and_nothing_is_left_of_it(tmp_path: pathlib.Path) -> None:
    page = StatusPage(tmp_path / "status")
    page.write(Status(epoch_id=1, is_ready=1))
    os.mkfifo(tmp_path / "lines")
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(tmp_path / "lines")]
    with PseudoTerminal(command, PYTHONPATH=str(ROOT), NO_COLOR="1") as terminal:
        with (tmp_path / "lines").open("w") as lines:
            terminal.wait_for(lambda seen: seen == [IDLE])
            for line in (r"12:30:05 INFO    engine: one\n", r"half a ", r"line\n", r"stdout \x1b[2J\xe9\n"):
                print(line, end="\n", file=lines, flush=True)
            terminal.wait_for(lambda seen: seen[-1] == IDLE and "stdout [2J\ufffd" in seen)
            page.write(Status(epoch_id=1, is_ready=1, has_work=1, num_requests_running=3))
            busy = "3 running, 0 waiting | decode 0 tokens/s | prefill 0 tokens/s | KV cache 0%"
            terminal.wait_for(lambda seen: seen[-1] == busy)
            num_bytes = len(terminal.raw)
            terminal.resize(45)
            terminal.wait_for(lambda seen: seen[-1] == "3 running, 0 waiting | decode 0 tokens/s")
            assert len(terminal.raw) - num_bytes < 100
            print("unfinished", end="", file=lines)
        assert terminal.wait() == 0
        assert [line for line in terminal.lines if line.strip()] == [
            *("12:30:05 one", "half a ", "line", "stdout [2J\ufffd", "unfinished", "done"),
        ]
        assert "\x1b[2m" not in terminal.raw
        assert terminal.attributes == terminal.before


def test_what_does_not_change_is_not_drawn_again(tmp_path: pathlib.Path) -> None:
    StatusPage(tmp_path / "status").write(Status(epoch_id=1, is_ready=1))
    os.mkfifo(tmp_path / "lines")
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(tmp_path / "lines")]
    with PseudoTerminal(command, PYTHONPATH=str(ROOT)) as terminal, (tmp_path / "lines").open("w"):
        terminal.wait_for(IDLE)
        num_bytes = len(terminal.raw)
        time.sleep(3 * status_line.DRAW_EVERY_S)
        assert len(terminal.raw) == num_bytes


def test_several_engines_are_one_line() -> None:
    """One that is not loaded says nothing; one that loads is told before the rate of the others."""
    first = Status(epoch_id=1, is_ready=1, num_requests_running=2, num_blocks=10, num_used_blocks=5)
    second = Status(epoch_id=2, is_ready=1, num_requests_running=1, num_blocks=30, num_used_blocks=5, has_work=1)
    loading = Status(epoch_id=3, loaded_bytes=1, total_bytes=4)
    assert described((0, together([first, Status(), second])))[:1] == ["3 running, 0 waiting"]
    assert described((0, together([first, second])))[-1] == "KV cache 25%"
    assert described((0, together([first, loading])))[0].startswith("loading weights [#####")
    assert described((0, together([Status()]))) == ["the engine starts"]


@pytest.mark.skipif(shutil.which("tmux") is None, reason="no terminal here that wraps lines when it grows narrower")
def test_a_narrower_terminal_keeps_one_status_line(tmp_path: pathlib.Path) -> None:
    StatusPage(tmp_path / "status").write(Status(epoch_id=1, is_ready=1, has_work=1, num_requests_running=3))
    os.mkfifo(tmp_path / "lines")
    tmux = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null"]
    writer = shlex.join([sys.executable, "-c", WRITER, str(tmp_path), str(tmp_path / "lines")])
    sized = ["-d", "-x", "110", "-y", "24", "-e", f"PYTHONPATH={ROOT}", writer]
    subprocess.run([*tmux, "new-session", *sized], check=True)

    def seen() -> list[str]:
        shown = subprocess.run([*tmux, "capture-pane", "-p"], check=True, capture_output=True, text=True).stdout
        return [line for line in shown.splitlines() if line]

    try:
        with (tmp_path / "lines").open("w") as lines:
            print("above", file=lines, flush=True)
            for columns, last in ((110, "KV cache 0%"), (30, "3 running, 0 waiting"), (110, "KV cache 0%")):
                subprocess.run([*tmux, "resize-window", "-x", str(columns), "-y", "24"], check=True)
                deadline = time.monotonic() + 60
                while not seen()[-1:] or not seen()[-1].endswith(last):
                    assert time.monotonic() < deadline, seen()
                    time.sleep(0.05)
                assert [line for line in seen() if line != "above"] == seen()[-1:]
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
