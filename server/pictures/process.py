"""Has pictures read by a process of their own, which may die of them (see `child`), and bounds what is held of them.

Owns that process: it is started for the first picture, which takes seconds, and kept. It serves one picture at a time,
in the order in which they come. If it dies, the next picture starts another. What was made of the last files is kept:
agents send their screenshots again in every turn.
"""

import asyncio
import atexit
import contextlib
import hashlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from weft.engine.wire.messages import frame, receive
from weft.engine.wire.pictures import Picture, SharedData
from weft.server.child_limits import child_environment
from weft.server.errors import InternalError, QueueFullError, UnsupportedValueError
from weft.server.pictures.calls import MAX_ANSWER_BYTES, Made, Ready

MAX_HELD_BYTES: Final = 1 << 30
"""Of pictures of all requests that have not ended, and of those that are kept, in one server process."""
MAX_KEPT_BYTES: Final = 256 << 20
"""Of pictures that are kept for another request."""
_GROWTH_BYTES: Final = 3 << 30
_START_S: Final = 300.0
_READ_S: Final = 300.0
"""A process that was stopped, or gets no core, is ended after so long."""
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


class _Process:
    """One process; one thread uses it at a time."""

    def __init__(self, folder: Path, token_id: int) -> None:
        self._link, theirs = socket.socketpair()
        self._made = os.memfd_create("weft-made")
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "weft.server.pictures.child"),
                    *(str(folder), str(token_id), str(_GROWTH_BYTES), str(self._made)),
                ],
                stdin=theirs.fileno(),
                pass_fds=(self._made,),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=child_environment() | _ENVIRONMENT,
                start_new_session=True,
            )
        try:
            answer = receive(self._link, MAX_ANSWER_BYTES, time.monotonic() + _START_S)
            ready = msgspec.msgpack.decode(answer, type=Ready)
        except (EOFError, OSError, ValueError, msgspec.MsgspecError):
            ready = Ready(fault="its process died")
        if ready.fault is not None:
            self.close()
            raise InternalError(f"pictures cannot be read: the model's processor cannot be loaded ({ready.fault})")
        self.sign = ready.sign

    def shared(self, made: Made) -> int:
        """The number of memory that is a copy of what the process has made last."""
        number, num_left = os.memfd_create("weft-picture"), made.num_bytes
        try:
            while num_left:
                num_left -= os.sendfile(number, self._made, made.num_bytes - num_left, num_left)
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
            return msgspec.msgpack.decode(answer, type=Made)
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

    def close(self) -> None:
        """End it; nothing that it does is waited for."""
        self._process.kill()
        self._process.wait()
        self._link.close()
        if self._made >= 0:
            os.close(self._made)
        self._made = -1


@dataclass(frozen=True, slots=True)
class ReadPicture:
    """What became of a file.

    Attributes:
        sign: What a chat template writes for a picture.
        picture: None if there is a fault. What it shares is open as long as it lives.
    """

    made: Made
    sign: str
    picture: Picture | None


class PictureProcess:
    """The process of one model, which any task of one event loop may use."""

    def __init__(self, folder: Path) -> None:
        """Start none.

        Args:
            folder: That of the checkpoint.
        """
        self._folder = folder
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()  # a thread goes on when its task is cancelled
        self._process: _Process | None = None
        self._held = set[SharedData]()
        self._kept = OrderedDict[tuple[str, bytes], ReadPicture]()  # the least recently used first
        atexit.register(self.close)

    async def read(self, data: bytes, token_id: int, tenant: str = "") -> ReadPicture:
        """What becomes of a file.

        Args:
            token_id: That of the engine's pictures.
            tenant: Who asks. Nobody can tell from the time it takes what others have sent.

        Raises:
            InternalError: The checkpoint's processor cannot be loaded.
            UnsupportedValueError: Pillow is missing.
            QueueFullError: Too much is held.
        """
        if importlib.util.find_spec("PIL") is None:
            raise UnsupportedValueError(
                "this server cannot read pictures: the package is missing (pip install 'weft[images]')"
            )
        results = list[ReadPicture]()  # and not a future's result, which lives until garbage is collected
        async with self._turn:
            await asyncio.to_thread(self._find, data, token_id, tenant, results)
        return results.pop()

    def _find(self, data: bytes, token_id: int, tenant: str, results: list[ReadPicture]) -> None:
        key = tenant, hashlib.blake2b(data, digest_size=16).digest()
        with self._lock:
            found = self._kept.pop(key, None) or self._read(data, token_id)
            if found.picture is not None:
                self._kept[key] = found
            while sum(each.made.num_bytes for each in self._kept.values()) > MAX_KEPT_BYTES:
                self._kept.popitem(last=False)
            results.append(found)

    def _read(self, data: bytes, token_id: int) -> ReadPicture:
        if self._process is not None and not self._process.is_alive:
            self._process.close()
            self._process = None
        if self._process is None:
            self._process = _Process(self._folder, token_id)
        process, made = self._process, self._process.read(data)
        if made.fault is not None:
            return ReadPicture(made, process.sign, None)
        self._make_room(made.num_bytes)
        number = process.shared(made)
        shared = SharedData(os.getpid(), number, made.num_bytes, os.fstat(number).st_ino)
        picture = Picture(token_id, made.arrays, shared=shared, is_attended=made.is_attended)
        self._held.add(shared)
        weakref.finalize(picture, self._release, shared).atexit = False
        return ReadPicture(made, process.sign, picture)

    def _make_room(self, num_bytes: int) -> None:
        while self._num_held + num_bytes > MAX_HELD_BYTES and self._kept:
            self._kept.popitem(last=False)
        if self._num_held + num_bytes > MAX_HELD_BYTES:
            message = f"pictures of at most {MAX_HELD_BYTES} bytes may be held at once; try again in a moment"
            raise QueueFullError(message)

    @property
    def _num_held(self) -> int:
        return sum(shared.num_bytes for shared in tuple(self._held))

    def _release(self, shared: SharedData) -> None:
        """Called when nobody has the picture any more; the engine has taken its values, or never will."""
        self._held.discard(shared)
        os.close(shared.number)

    def close(self) -> None:
        """End the process, if there is one, and keep nothing; a later picture starts another."""
        self._kept.clear()
        process, self._process = self._process, None
        if process is not None:
            process.close()
