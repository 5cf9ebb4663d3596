"""Has pictures read by a process of their own, which may die of them (see `child`).

Owns that process: it is started for the first picture, which takes seconds, and kept until the model's engine has gone.
It serves one picture at a time (see `turns`). If it dies, the next picture starts another; if its processor cannot be
loaded, none is started for a while. Clients that leave have nothing more read than the picture at hand.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from weft.engine.wire.messages import frame, receive
from weft.engine.wire.pictures import SEALS
from weft.engine.wire.waiting_threads import WaitingThreads
from weft.server.child_limits import child_environment
from weft.server.errors import EngineUnavailableError, InternalError, UnsupportedValueError
from weft.server.pictures.calls import MAX_ANSWER_BYTES, Made, Ready
from weft.server.pictures.held import HeldPictures, Key, ReadPicture
from weft.server.pictures.turns import Turns

FAULT_S: Final = 60.0
"""How long no other process is started once one could not load the processor."""
_GROWTH_BYTES: Final = 3 << 30
_START_S: Final = 300.0
_READ_S: Final = 300.0
"""A process that was stopped, or gets no core, is ended after so long."""
_END_S: Final = 1.0
"""How long the end of a process is waited for."""
_MAX_SAID_BYTES: Final = 4000
"""Of what a process says before it dies, for the log."""
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

_log = logging.getLogger(__name__)


class _Process:
    """One process; one thread uses it at a time, and any may kill it."""

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
            self._said, words = os.pipe2(os.O_NONBLOCK)  # what is more than it holds is lost, and nobody waits for it
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
        self.sign = ready.sign
        return ready.fault

    def shared(self, made: Made) -> int:
        """The number of memory with what the process has made last, whose own memory is empty then."""
        number, num_left = os.memfd_create("weft-picture", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), made.num_bytes
        try:
            while num_left:
                num_left -= os.sendfile(number, self._made, made.num_bytes - num_left, num_left)
            os.ftruncate(self._made, 0)
            fcntl.fcntl(number, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(number)
            raise
        return number

    def read(self, data: bytes) -> Made:
        """What becomes of a file. If the process dies of it, it is closed."""
        try:
            self._link.settimeout(_READ_S)
            self._link.sendall(frame(data))
            answer = receive(self._link, MAX_ANSWER_BYTES, time.monotonic() + _READ_S)
            made = msgspec.msgpack.decode(answer, type=Made)
            self._last_words()
            return made
        except TimeoutError:
            self.close()
            return Made(f"to read it takes more than {_READ_S:g} s, with all that is read before it")
        except (EOFError, OSError, ValueError, msgspec.MsgspecError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)  # it has closed its side, so it is ending
            is_late = self._process.poll() == -signal.SIGPROF
            self.close()
            return Made("to read it takes too long" if is_late else "its reader died of it")
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
            self._process.wait(_END_S)
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


class PictureProcess:
    """The process of one model, which any task of one event loop may use."""

    def __init__(self, folder: Path) -> None:
        """Start none.

        Args:
            folder: That of the checkpoint.
        """
        self._folder = folder
        self._threads = WaitingThreads("pictures", 2)  # the one that reads, and one for digests
        self._turns = Turns()
        self._lock = threading.Lock()  # of the process: who has it uses it
        self._process: _Process | None = None
        self._fault: tuple[str, float] | None = None  # why none can be started, and until when none is
        self._num_closed = 0
        self.held = HeldPictures()

    async def read(self, data: bytes, token_id: int, tenant: str = "", dtype: str = "float32") -> ReadPicture:
        """What becomes of a file.

        Args:
            token_id: That of the engine's pictures.
            tenant: Who asks.
            dtype: In what the engine computes.

        Raises:
            InternalError: The checkpoint's processor cannot be loaded.
            UnsupportedValueError: Pillow is missing.
            QueueFullError: Too many wait, or too much is held.
            EngineUnavailableError: The engine has gone meanwhile.
        """
        if importlib.util.find_spec("PIL") is None:
            raise UnsupportedValueError(
                "this server cannot read pictures: the package is missing (pip install 'weft[images]')"
            )
        num_closed = self._num_closed  # what it was asked for is of the engine that is there now
        key = tenant, await asyncio.wrap_future(self._threads.submit(partial(_digest, data)))
        if (kept := self.held.find(key)) is not None:
            return kept
        results = list[ReadPicture]()  # and not a future's result, which lives until garbage is collected
        await self._turns.take(tenant)
        try:
            read = partial(self._read, data, key, (token_id, dtype), num_closed, results)
            reading = asyncio.wrap_future(self._threads.submit(read))
        except BaseException:
            self._turns.give_back()
            raise
        reading.add_done_callback(lambda _: self._turns.give_back())
        try:
            await asyncio.shield(reading)
        except asyncio.CancelledError:  # the thread goes on, and has its turn until it is done
            reading.add_done_callback(lambda _: results.clear())
            raise
        return results.pop()

    def _read(
        self, data: bytes, key: Key, engine: tuple[int, str], num_closed: int, results: list[ReadPicture]
    ) -> None:
        with self._lock:
            if (found := self.held.find(key)) is None:  # another request had it read meanwhile
                process = self._started(*engine, num_closed)
                made = process.read(data)
                self._check_open(num_closed)
                if made.fault is not None:
                    found = ReadPicture(made, process.sign, None)
                else:
                    found = self.held.hold(key, made, process.sign, engine[0], partial(process.shared, made))
            results.append(found)

    def _check_open(self, num_closed: int) -> None:
        if self._num_closed != num_closed:
            raise EngineUnavailableError()

    def _started(self, token_id: int, dtype: str, num_closed: int) -> _Process:
        """A process that has loaded the processor."""
        self._check_open(num_closed)
        if self._process is not None and self._process.is_alive:
            if self._process.engine == (token_id, dtype):
                return self._process
            self._process.kill()
        self._end()
        if self._fault is None or self._fault[1] < time.monotonic():
            fault = self._start(token_id, dtype)
            if self._num_closed != num_closed and self._process is not None:
                self._process.kill()  # `close` may not have waited for it
                self._end()
            self._check_open(num_closed)
            if self._process is not None:
                return self._process
            self._fault = fault, time.monotonic() + FAULT_S
        message = f"pictures cannot be read: the model's processor cannot be loaded ({self._fault[0]})"
        raise InternalError(f"{message}; it is tried again after {FAULT_S:g} s")

    def _start(self, token_id: int, dtype: str) -> str:
        """Start a process; why it cannot be, empty if it is."""
        try:
            self._process = _Process(self._folder, token_id, dtype)
        except OSError as error:
            return f"its process cannot be started: {error.strerror}"
        if fault := self._process.load_fault():
            self._end()
        return fault or ""

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def close(self) -> None:
        """End the process, if there is one, keep nothing, and let those who wait fail. A later picture starts another.

        To be called on the event loop, when the engine has gone.
        """
        self._num_closed += 1
        self._turns.end()
        self.held.forget()
        deadline = time.monotonic() + _END_S
        while not self._lock.acquire(timeout=0.01):  # a thread uses the process, and notices its end
            if (process := self._process) is not None:
                process.kill()
            if time.monotonic() > deadline:  # it waits for a disk that hangs; the thread closes it then
                return
        try:
            if self._process is not None:
                self._process.kill()
            self._end()
            self._fault = None
        finally:
            self._lock.release()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
