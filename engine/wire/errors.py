"""What a process says of itself: why it cannot start or serve a model, the limit behind an error, and its log.

The server and the engine both use it. Imports only the standard library, so that it works where little else does.
"""

import datetime
import errno
import json
import logging
import os
import pathlib
import re
import resource
import sys

EXIT_CANNOT_LOAD = 2
"""Exit code of a process that has said why it cannot load the model."""


class ModelError(Exception):
    """The model cannot be served; the message is one line that names the fault."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line of characters that every output takes."""
    return (str(error) or repr(error)).splitlines()[0].encode(errors="backslashreplace").decode()


_NO_MEMORY_WORDS = ("failed to map segment", "annot allocate memory", "an't allocate memory", "bad_alloc")
"""In messages of the dynamic loader, libc, torch and C++, whose errors have any type."""


def explain(error: BaseException | None) -> str | None:
    """One line if a limit is behind an error, its cause or its context; else None."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        text = str(error)
        if number in (errno.EMFILE, errno.ENFILE):
            return f"too many open files; {_files()}"
        if "can't start new thread" in text:
            return f"no process or thread can be started; {_processes()}; {memory()}"
        if number == errno.ENOMEM or isinstance(error, MemoryError) or any(w in text for w in _NO_MEMORY_WORDS):
            return f"memory ran out; {memory()}"
        error = error.__cause__ or error.__context__
    return None


def describe() -> str:
    """All limits that a process may reach while it starts."""
    return f"{memory()}; {_files()}; {_processes()}"


def memory() -> str:
    """The memory limits that are set, and free memory."""
    facts = []
    for name, what, flag in ((resource.RLIMIT_AS, "address space", "v"), (resource.RLIMIT_DATA, "data", "d")):
        if (soft := resource.getrlimit(name)[0]) != resource.RLIM_INFINITY:
            facts.append(f"{what} is limited to {soft // 1_000_000:,} MB (ulimit -{flag})")
    if (limit := _read("/sys/fs/cgroup/memory.max").strip()).isdecimal():
        facts.append(f"this control group is limited to {int(limit) // 1_000_000:,} MB")
    free = [line.split()[1] for line in _read("/proc/meminfo").splitlines() if line.startswith("MemAvailable")]
    return ", ".join([*facts, *(f"{int(kilobytes) * 1024 // 1_000_000:,} MB are free" for kilobytes in free)])


def _files() -> str:
    return f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files may be open (ulimit -n)"


def _processes() -> str:
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return f"{'any number of' if soft == resource.RLIM_INFINITY else soft} processes may run (ulimit -u)"


def _read(path: str) -> str:
    """A file's text; empty if it cannot be opened, perhaps because too many files are open."""
    try:
        return pathlib.Path(path).read_text()
    except OSError:
        return ""


_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
"""Fields that every record has."""


def configure(log_format: str, process: str) -> None:
    """Send the log of this process to stderr; every process of Weft does.

    Fields beside the message come from logging's `extra=`: `logger.info("restarting", extra={"delay_s": 1})`.

    Args:
        log_format: `json` for one JSON object per line, for machines; else text lines, for people.
        process: Its name in every line, such as "supervisor".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(process, is_json=log_format == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries
    for ours in ("weft", "__main__"):
        logging.getLogger(ours).setLevel(logging.INFO)


CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What names from others must not do to a terminal or a log; lines and tabs are left."""


class _Formatter(logging.Formatter):
    def __init__(self, process: str, *, is_json: bool) -> None:
        super().__init__()
        self._process = process
        self._is_json = is_json

    def format(self, record: logging.LogRecord) -> str:
        """`12:30:05 INFO    supervisor: message field=value` and a traceback, or one JSON object in one line."""
        time = datetime.datetime.fromtimestamp(record.created).astimezone()
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        traceback = self.formatException(record.exc_info) if record.exc_info else None
        if self._is_json:
            line = {
                "time": time.isoformat(timespec="milliseconds"),
                "level": record.levelname.lower(),
                "process": self._process,
                "pid": os.getpid(),
                "logger": record.name,
                "message": record.getMessage(),
                **fields,
            }
            return json.dumps(line | ({"traceback": traceback} if traceback else {}), default=str, ensure_ascii=False)
        text = f"{time:%H:%M:%S} {record.levelname:<7} {self._process}: {record.getMessage()}"
        text += "".join(f" {name}={value}" for name, value in fields.items())
        text = CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
        return f"{text}\n{traceback}" if traceback else text
