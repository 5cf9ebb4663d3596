"""Has chat templates compiled and rendered in processes of their own, which may die of them (see `template_child`).

Owns those processes. Any thread may call; a process serves one call at a time. Mostly there is one. If it is busy for
longer than usual conversations take, another is started, so that nobody waits long for a template that is slow. Knows
nothing of messages.
"""

import atexit
import contextlib
import functools
import json
import marshal
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Final

from weft.server.child_limits import child_environment
from weft.server.text.template_calls import ANSWER, CALL, DONE, TOO_MUCH, read_exactly

MAX_BYTES: Final = 1 << 30
"""By which a process may grow."""
MAX_NUM: Final = 8
"""Most processes at a time."""
_START_AFTER_S: Final = 0.05
"""A call waits so long for a process before another is started."""
_WAIT_S: Final = 300.0
"""A process that was stopped, or gets no core, is ended after so long."""
_MAX_ANSWER_BYTES: Final = 1 << 30


class TemplateLimitError(Exception):
    """A template takes too much; the message says of what."""


class ProcessDiedError(TemplateLimitError):
    """A process died, perhaps of the template; the message says how."""


class _EndedError(Exception):
    """A process ended by itself before it began the call."""


class _Process:
    """One process, and the keys of the templates that it has compiled. One thread uses it at a time."""

    def __init__(self, max_bytes: int) -> None:
        self.keys: set[int] = set()
        self._link, theirs = socket.socketpair()
        self._link.settimeout(_WAIT_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "weft.server.text.template_child", str(max_bytes)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(
        self, operation: str, key: int, source: str, arguments: tuple[Any, ...], seconds: float
    ) -> tuple[list[Any], str]:
        """What `TemplateProcesses.call` does; raises _EndedError besides."""
        content = marshal.dumps((operation, key, None if key in self.keys else source, arguments))
        try:
            self._link.sendall(CALL.pack(len(content), seconds))
            self._link.sendall(content)
            num_bytes, num_first = ANSWER.unpack(read_exactly(self._link, ANSWER.size))
            if not num_first <= num_bytes <= _MAX_ANSWER_BYTES:
                raise OSError("the answer is too long")
            answer = memoryview(read_exactly(self._link, num_bytes))
            head = json.loads(bytes(answer[:num_first]))
        except (EOFError, OSError) as error:
            raise self._fault(error, seconds) from None
        except BaseException:  # the rest of the answer would be taken for that of the next call
            self.close()
            raise
        if head[0] == TOO_MUCH:
            raise TemplateLimitError(head[1])
        if head[0] == DONE:
            self.keys.add(key)
        return head, str(answer[num_first:], "utf-8")

    def _fault(self, error: Exception, seconds: float) -> Exception:
        """Why there is no answer. The process is ended."""
        if isinstance(error, TimeoutError):
            self.close()
            return TemplateLimitError(f"it takes more than {_WAIT_S:g} s, with all that runs beside it")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)  # it has closed its side, so it is ending
        self.close()
        status = self._process.returncode
        if status == 0:
            return _EndedError()
        if status == -signal.SIGPROF:
            return TemplateLimitError(f"it takes more than {seconds:g} s")
        return ProcessDiedError(f"its process died of it (exit status {status})")

    def close(self) -> None:
        """End it; nothing that it does is waited for."""
        self._process.kill()
        self._process.wait()
        self._link.close()


class TemplateProcesses:
    """All processes that render for this one."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """Start none; they end with this process.

        Args:
            max_bytes: By which each may grow.
        """
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._idle: list[_Process] = []
        self._num = 0  # with those that are just starting
        atexit.register(self.close)

    def start(self) -> None:
        """Start one if there is none, and do not wait for it."""
        if not self._num:
            self._give(self._take(0))

    def call(
        self, operation: str, key: int, source: str, arguments: tuple[Any, ...], seconds: float
    ) -> tuple[list[Any], str]:
        """Have something done with a template.

        Args:
            key: Names the source to all processes.
            arguments: JSON values.
            seconds: Of CPU time.

        Returns:
            The outcome with what belongs to it, and the rendered text.

        Raises:
            TemplateLimitError: It takes too much, or the process died.
            ValueError: The arguments are nested too deeply.
            OSError: No process can be started.
        """
        while True:
            process = self._take(key)
            try:
                if process.is_alive:
                    return process.call(operation, key, source, arguments, seconds)
            except _EndedError:
                continue
            finally:
                self._give(process)

    def close(self) -> None:
        """End those that are idle. A later call starts others; the busy ones end with this process."""
        with self._changed:
            idle, self._idle = self._idle, []
            self._num -= len(idle)
        for process in idle:
            process.close()

    def _take(self, key: int) -> _Process:
        """An idle process, one that knows the template if possible; or a new one."""
        start_time = time.monotonic() + _START_AFTER_S
        with self._changed:
            while not self._idle and self._num and (self._num >= MAX_NUM or time.monotonic() < start_time):
                self._changed.wait(_START_AFTER_S)
            if self._idle:
                process = next((each for each in self._idle if key in each.keys), self._idle[-1])
                self._idle.remove(process)
                return process
            self._num += 1
        try:
            return _Process(self._max_bytes)
        except BaseException:
            self._forget_one()
            raise

    def _give(self, process: _Process) -> None:
        if process.is_alive:
            with self._changed:
                self._idle.append(process)
                self._changed.notify()
        else:
            process.close()
            self._forget_one()

    def _forget_one(self) -> None:
        with self._changed:
            self._num -= 1
            self._changed.notify()


@functools.cache
def processes() -> TemplateProcesses:
    """Those of this process."""
    return TemplateProcesses()
