"""One engine process as the supervisor sees it: the child, its folder and its status page.

Owns what is to be done when an engine hangs or has ended: its page, which outlives it, must not say that it serves, and
a kill from outside must not be blamed on a request. Never waits, except in `close`.
"""

import logging
import os
import pathlib
import signal
import socket
import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from weft.engine.shared.messages import (
    FAULT_NAME,
    SOCKET_NAME,
    STATUS_NAME,
    STEP_NAME,
    SUSPECTS_NAME,
    EngineOptions,
    Leave,
    encode,
)
from weft.engine.wire.status_page import Status, StatusPage
from weft.server.run.child import Child
from weft.server.run.watchdog import Watchdog

ENGINE_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=2000000000:glibc.malloc.trim_threshold=4000000000"}
"""glibc keeps the memory of one step for the next: fresh pages took a third of the time of a prefill on the CPU. The
user's own value wins."""

logger = logging.getLogger(__name__)


class EngineProcess:
    """An engine. Only the supervisor mutates it.

    Attributes:
        child: The process, which the supervisor starts and reaps.
    """

    def __init__(self, label: str, folder: pathlib.Path, command: Sequence[str], options: EngineOptions) -> None:
        """Prepare it without starting it. The folder has a status page."""
        stdin = msgspec.json.encode(options)
        self.child = Child(label, [*command, str(folder)], ENGINE_ENVIRONMENT | os.environ, stdin=stdin)
        self._folder = folder
        self._page = StatusPage(folder / STATUS_NAME)
        self._watchdog = Watchdog(self._page)
        self._has_killed = False  # True: killed, and not reaped yet

    @property
    def status(self) -> Status:
        """The latest reading of its page."""
        return self._page.read()

    def wait_s(self) -> float | None:
        """Seconds in which it cannot be found hanging; None: for ever."""
        return None if self._has_killed else self._watchdog.wait_s()

    def kill_if_hung(self) -> None:
        """Kill it if it gives no sign of life."""
        if self._has_killed or (status := self._watchdog.hung()) is None:
            return
        self._has_killed = True
        logger.error(
            "The %s hangs: no sign of life for %.0f s, with %d requests running and %d waiting; killing it",
            self.child.name,
            time.monotonic() - status.progress_time,
            status.num_requests_running,
            status.num_requests_waiting,
        )
        self.child.send_signal(signal.SIGKILL)

    def note_end(self, code: int) -> None:
        """Tidy up after a process that ended with this code, or minus the signal that killed it."""
        gone = ("is_ready", "stall_time", "has_work", "num_requests_running", "num_requests_waiting", "num_used_blocks")
        self._page.write(replace(self.status, **dict.fromkeys(gone, 0)))  # nothing is served until the next one writes
        if code == -signal.SIGKILL and not self._has_killed:  # for example by the out-of-memory killer
            (self._folder / STEP_NAME).unlink(missing_ok=True)  # no request is to blame
        self._has_killed = False

    def forget_suspects(self) -> None:
        """Clear the record of requests that are suspected or convicted of having crashed it."""
        (self._folder / SUSPECTS_NAME).unlink(missing_ok=True)

    def leave(self) -> None:
        """Let it end once it has answered what it has accepted; one that cannot be told ends at once."""
        try:
            with socket.socket(socket.AF_UNIX) as link:
                link.setblocking(False)
                link.connect(str(self._folder / SOCKET_NAME))
                link.send(encode(Leave()))
        except OSError:
            self.child.send_signal(signal.SIGKILL)

    def rest(self) -> None:
        """After its end: do not start it again, and show that there is no engine."""
        self.child.rest()
        self._page.write(Status())

    def take_fault(self) -> str:
        """Why it could not load its model; empty if it did not say so."""
        try:
            return (self._folder / FAULT_NAME).read_text()
        except OSError:
            return ""
        finally:
            (self._folder / FAULT_NAME).unlink(missing_ok=True)

    def close(self) -> None:
        """Kill it and wait for its end, if it runs."""
        self.child.kill()
        self._page.close()
