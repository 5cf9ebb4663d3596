import builtins
import json
import pathlib
import readline
from collections.abc import Iterator

import pytest

from weft.server.cli import display as line_input
from weft.server.cli.display import LineInput, history_path


@pytest.fixture(autouse=True)
def empty_history() -> Iterator[None]:
    readline.clear_history()
    yield
    readline.clear_history()


def read(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> str:
    """The message read after these lines and Ctrl-D are typed."""
    typed = iter(lines)

    def type_line(prompt: str) -> str:
        for line in typed:
            return line
        raise EOFError

    monkeypatch.setattr(builtins, "input", type_line)
    message = LineInput(path).read("> ")
    assert next(typed, None) is None
    return message


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one"], "one"),
        (["one\\", " two\\", "three"], "one\n two\nthree"),
        (['"""', "one", "", "  two", '"""'], "one\n\n  two"),
        (['"""one', 'two"""  '], "one\ntwo"),
        (['"""one"""'], "one"),
        (['"""', "one \\", "two"], "one \\\ntwo"),  # Ctrl-D ends the block
        (["half \udcff"], "half ?"),
    ],
)
def test_a_message_may_have_several_lines(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], message: str
) -> None:
    assert read(tmp_path / "history", monkeypatch, *lines) == message


def test_history_has_messages_and_belongs_to_the_user(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state" / "weft" / "chat_history"
    read(path, monkeypatch, "one\\", "two")
    read(path, monkeypatch, "  ")
    read(path, monkeypatch, "three")
    assert [json.loads(line) for line in path.read_text().splitlines()] == ["one\ntwo", "three"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    readline.clear_history()
    LineInput(path)
    assert [readline.get_history_item(i + 1) for i in range(2)] == ["one\ntwo", "three"]


def test_a_long_history_is_cut_to_its_end(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_input, "MAX_HISTORY", 3)
    path = tmp_path / "history"
    path.write_text("".join(f'"{i}"\n' for i in range(7)))
    LineInput(path)
    assert path.read_text() == '"4"\n"5"\n"6"\n'
    assert readline.get_history_item(1) == "4"


def test_a_history_that_cannot_be_used_is_done_without(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not JSON")
    assert read(tmp_path / "file", monkeypatch, "one") == "one"
    assert read(tmp_path / "file" / "below", monkeypatch, "two") == "two"


def test_the_history_lies_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert history_path() == pathlib.Path("/state/weft/chat_history")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/me")
    assert history_path() == pathlib.Path("/home/me/.local/state/weft/chat_history")
