import json
import logging
from collections.abc import Iterator

import pytest

from weft.engine.wire import errors as logs


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, ("weft", "__main__"))]
    handlers, levels = root.handlers[:], [logger.level for logger in loggers]
    yield
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize("name", ["weft.server.x", "weft.engine.x", "__main__"])
def test_what_weft_says_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine's plan was lost: only the server's loggers had been let through."""
    logs.configure("text", "engine")
    logging.getLogger(name).info("plan")
    assert capsys.readouterr().err.endswith(" INFO    engine: plan\n")


def test_text_line_has_message_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", "supervisor")
    logging.getLogger("weft.server.x").info("restarting %s", "it", extra={"delay_s": 1.5})
    logging.getLogger("library").info("chatter")
    line = capsys.readouterr().err
    assert line.endswith(" INFO    supervisor: restarting it delay_s=1.5\n")
    assert line.count("\n") == 1


@pytest.mark.parametrize("name", ["a\0b", "\x1b[31mred", "\x07\x08\x7f\x9b", "\u202egpj", "\u2067x", "a\rb", "\ud800"])
def test_names_of_others_do_nothing_to_a_terminal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An alias with NUL characters made the supervisor's log a binary file."""
    logs.configure("text", "supervisor")
    logging.getLogger("weft.server.x").info("%s is the model m", name, extra={"alias": name})
    line = capsys.readouterr().err
    assert line.removesuffix("\n").isprintable() and line.count("\\") >= 2
    assert " is the model m alias=" in line


def test_json_line_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", "server")
    try:
        raise ValueError("broken\nin two lines")
    except ValueError:
        logging.getLogger("weft.server.x").exception("failed", extra={"request_id": "r1"})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    line = json.loads(lines[0])
    assert {k: line[k] for k in ("level", "process", "logger", "message", "request_id")} == {
        "level": "error",
        "process": "server",
        "logger": "weft.server.x",
        "message": "failed",
        "request_id": "r1",
    }
    assert "ValueError: broken" in line["traceback"]
