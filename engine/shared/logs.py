"""How log lines look: text for people, one JSON object per line for machines. Everything goes to stderr.

Fields beside the message come through logging's own `extra=`: `logger.info("restarting", extra={"delay_s": 1})`.
Every process of Weft uses it. Refuses nothing, imports only the standard library.
"""

import datetime
import json
import logging
import os
import sys

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def configure(log_format: str, process: str) -> None:
    """Send the log of this process to stderr; `process` is its name in each line, such as "supervisor"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if log_format == "json" else _TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries
    for ours in ("weft", "__main__"):
        logging.getLogger(ours).setLevel(logging.INFO)


def _time(record: logging.LogRecord) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(record.created).astimezone()


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """`12:30:05 INFO  supervisor: message field=value`, then the traceback, if any."""
        line = f"{_time(record):%H:%M:%S} {record.levelname:<7} {self._process}: {record.getMessage()}"
        line += "".join(f" {name}={value}" for name, value in _fields(record).items())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object without a line break."""
        line: dict[str, object] = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
