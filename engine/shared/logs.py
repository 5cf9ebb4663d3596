"""Configures logging to stderr: text lines for people, or one JSON object per line for machines.

Fields beside the message come from logging's `extra=`: `logger.info("restarting", extra={"delay_s": 1})`. Every process
of Weft uses it. Imports only the standard library.
"""

import datetime
import json
import logging
import os
import sys

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def configure(log_format: str, process: str) -> None:
    """Send the log of this process to stderr; `process` is its name in every line, such as "supervisor"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(process, is_json=log_format == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries
    for ours in ("weft", "__main__"):
        logging.getLogger(ours).setLevel(logging.INFO)


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
        return f"{text}\n{traceback}" if traceback else text
