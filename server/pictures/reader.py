"""One process that reads pictures (see `child`): its start, what is said to it, and its end.

It may die of a picture, be stopped, or say what is not so; none of that is more than the fault of a picture.
"""

import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from weft.engine.wire.messages import frame, receive
from weft.engine.wire.pictures import MAX_REQUEST_BYTES, SEALS
from weft.server.child_limits import child_environment
from weft.server.pictures.calls import MAX_ANSWER_BYTES, Made, Ready

_GROWTH_BYTES: Final = 3 << 30
_START_S: Final = 300.0
READ_S: Final = 120.0
"""To send a file and to have the answer: a process that was stopped, or gets no core, is ended after so long."""
DIED: Final = "its reader died of it"
END_S: Final = 1.0
"""How long the end of a process is waited for."""
_MAX_SAID_BYTES: Final = 4000
"""Of what a process says before it dies, for the log."""
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

_log = logging.getLogger(__name__)


class ReaderProcess:
    """One thread uses it at a time, and any may kill it.

    Attributes:
        sign: What a chat template writes for a picture, once the processor is loaded.
        engine: For which it reads: the token of pictures, and the type in which it computes.
    """

    def __init__(self, folder: Path, token_id: int, dtype: str) -> None:
        """Start it; raises OSError."""
        self.sign, self.engine = "", (token_id, dtype)
        self._is_killed = False
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as theirs:
            self._link, link = socket.socketpair()
            opened.enter_context(self._link)
            theirs.enter_context(link)
            self._made = os.memfd_create("weft-made")
            opened.callback(os.close, self._made)
            self._said, words = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # what is more is lost
            opened.callback(os.close, self._said)
            theirs.callback(os.close, words)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "weft.server.pictures.child"),
                    *(str(folder), str(token_id), dtype, str(_GROWTH_BYTES), str(self._made)),
                ],
                stdin=link.fileno(),
                pass_fds=(self._made,),
                stdout=subprocess.DEVNULL,
                stderr=words,
                env=child_environment() | _ENVIRONMENT,
                start_new_session=True,
            )
            self._open = opened.pop_all()

    def load_fault(self) -> str | None:
        """Wait until the processor is loaded; why it is not, None if it is."""
        try:
            answer = receive(self._link, MAX_ANSWER_BYTES, time.monotonic() + _START_S)
            ready = msgspec.msgpack.decode(answer, type=Ready)
        except (EOFError, OSError, ValueError, msgspec.MsgspecError):
            ready = Ready(fault="its process died")
        if ready.text:
            _log.warning("the processor that reads pictures cannot be loaded: %s: %s", ready.fault, ready.text)
        self.sign = ready.sign
        return ready.fault

    def shared(self, made: Made) -> int:
        """The number of memory with what the process has made last.

        Raises:
            EOFError: That is less than it says.
            OSError: There is no memory, or no number.
        """
        number, num_left = os.memfd_create("weft-picture", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), made.num_bytes
        try:
            while num_left:
                if not (num_sent := os.sendfile(number, self._made, made.num_bytes - num_left, num_left)):
                    raise EOFError
                num_left -= num_sent
            fcntl.fcntl(number, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(number)
            raise
        return number

    def empty(self) -> None:
        """Free the memory of what it has made last."""
        if not self._is_killed:  # else it is closed, or soon will be
            os.ftruncate(self._made, 0)

    def read(self, data: bytes) -> Made:
        """What becomes of a file. If the process dies of it, it is closed."""
        try:
            deadline = time.monotonic() + READ_S
            self._link.settimeout(READ_S)
            self._link.sendall(frame(data))
            made = msgspec.msgpack.decode(receive(self._link, MAX_ANSWER_BYTES, deadline), type=Made)
            self._last_words()
            if made.fault is None and not 0 < made.num_bytes <= MAX_REQUEST_BYTES:
                raise ValueError(made.num_bytes)
            return made
        except TimeoutError:
            self.close()
            return Made(f"to read it takes more than {READ_S:g} s")
        except (EOFError, OSError, ValueError, msgspec.MsgspecError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)  # it has closed its side, so it is ending
            is_late = self._process.poll() == -signal.SIGPROF
            self.close()
            return Made("to read it takes too long" if is_late else DIED)
        except BaseException:  # the rest of the answer would be taken for that of the next picture
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether it still serves."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it, for no fault of its own; who uses it closes it."""
        self._is_killed = True
        self._process.kill()

    def close(self) -> None:
        """End it; nothing that it does is waited for. If it ended by itself, the log has its last words."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        if not self._is_killed:
            status, words = self._process.returncode, self._last_words()
            _log.warning("the process that reads pictures ended (%s); it said: %r", status, words)
        self._is_killed = True
        self._open.close()

    def _last_words(self) -> str:
        """The end of what it has said since the last call."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._said, 1 << 20)[-_MAX_SAID_BYTES:].decode("utf-8", "replace")
        return ""
