'''Reads the user's messages from the terminal: line editing, history, messages of several lines.

A backslash at the end of a line continues the message on the next line. A message that begins with """ ends with """.
The history is a file with one JSON string per message, which only this user can read.
'''

import contextlib
import json
import os
import pathlib
import readline
import sys

MAX_HISTORY = 1000
QUOTES = '"""'
_MORE = ". "


def history_path() -> pathlib.Path:
    """The history file, as the XDG Base Directory Specification places it."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = pathlib.Path(state) if os.path.isabs(state) else pathlib.Path.home() / ".local" / "state"
    return folder / "weft" / "chat_history"


class LineInput:
    """Input from the keyboard. Works without a history if its file cannot be read or written."""

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
