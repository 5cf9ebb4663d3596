import json
import os
import pathlib
import signal
import sys
from collections.abc import Iterator

import pytest

from weft.server.supervise import spawn
from weft.server.supervise.spawn import python_command

CHILD = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(repr((sys.argv[1:], sys.stdin.read())))"


@pytest.fixture
def engine_command(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """What stands for an engine: a module that writes down what it was given."""
    (tmp_path / "told.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    command = (*python_command("weft.engine.start.launch"), "told")
    monkeypatch.setattr(spawn, "ENGINE_COMMAND", command)
    yield command
    if spawn._ahead is not None:
        spawn._ahead.process.kill()
        spawn._ahead.process.wait()
        spawn._ahead.link.close()
        spawn._ahead = None


def environment() -> dict[str, str]:
    return spawn.ENGINE_ENVIRONMENT | os.environ


def waiting_pid() -> int:
    assert spawn._ahead is not None
    return spawn._ahead.process.pid


def test_an_engine_that_was_started_ahead_gets_its_arguments_and_standard_input(
    engine_command: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    spawn.start_ahead()
    pid, file = waiting_pid(), str(tmp_path / "written")
    given = json.dumps({"key": "ü" * 100_000})  # longer than a pipe holds
    process = spawn.spawn([*engine_command, file, "b"], environment(), stdin=given.encode())
    assert process.pid == pid
    assert process.wait(60) == 0
    assert (tmp_path / "written").read_text() == repr(([file, "b"], given))
    again = spawn.spawn([*engine_command, file], environment())  # there is no second one
    assert again.pid != pid
    assert again.wait(60) == 0
    assert (tmp_path / "written").read_text() == repr(([file], ""))


@pytest.mark.parametrize("difference", ["command", "environment", "dead"])
def test_one_that_does_not_fit_ends_and_another_process_starts(
    engine_command: tuple[str, ...], tmp_path: pathlib.Path, difference: str
) -> None:
    spawn.start_ahead()
    assert spawn._ahead is not None
    waiting, file = spawn._ahead.process, str(tmp_path / "written")
    command = [*engine_command, file]
    if difference == "command":
        command = [sys.executable, "-c", CHILD, file]
    if difference == "dead":
        waiting.kill()
        waiting.wait()
    more = {"A": "b"} if difference == "environment" else {}
    process = spawn.spawn(command, environment() | more, stdin=b"c")
    assert process.pid != waiting.pid
    assert process.wait(60) == 0
    assert (tmp_path / "written").read_text() == repr(([file], "c"))
    assert waiting.returncode == -signal.SIGKILL


def test_without_room_for_a_process_nothing_waits(
    engine_command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "ENGINE_COMMAND", ("/no/such/program",))
    spawn.start_ahead()
    assert spawn._ahead is None


def test_modules_are_not_taken_from_the_current_folder() -> None:
    command = python_command("weft.engine.process", "a")
    assert command == [sys.executable, "-P", "-m", "weft.engine.process", "a"]


def test_it_writes_to_where_this_process_writes_by_then(
    engine_command: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    """The supervisor leads its streams through the status line before it starts anything."""
    (tmp_path / "told.py").write_text("import sys; print('out', flush=True); print('err', file=sys.stderr)")
    spawn.start_ahead()
    before = [os.dup(stream) for stream in (1, 2)]
    with (tmp_path / "written").open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        try:
            process = spawn.spawn(engine_command, environment())
        finally:
            for stream, kept in zip((1, 2), before, strict=True):
                os.dup2(kept, stream)
                os.close(kept)
    assert process.wait(60) == 0
    assert (tmp_path / "written").read_text() == "out\nerr\n"
