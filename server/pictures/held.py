"""Holds what was made of pictures for one model: for requests that have not ended, and some for later ones.

Owns the memory that it is in, without a name, each picture under the number of an open file. A picture is let go when
nobody has it any more: neither a request nor those that are kept, of which the least recently used go first, also where
others need their room: first those of who needs it, others' only if that helps. Bytes and numbers are bounded and
shared: an API key has at most as much as is left.
"""

import os
import resource
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from weft.engine.wire.pictures import Picture, SharedData
from weft.server.errors import QueueFullError
from weft.server.pictures.calls import Made

MAX_HELD_BYTES: Final = 2 << 30
"""Of all pictures of one model in one server process."""
MAX_KEPT_BYTES: Final = 256 << 20
"""Of those among them that are kept for another request."""
FAULTS_S: Final = 60.0
"""How long a file with a fault is not tried again."""
MAX_FAULTS: Final = 1000
"""That are remembered."""
SHARE_OF_FILES: Final = 16
"""One in so many of the files that the process may open is for the pictures of one model; connections have most."""

Key = tuple[str, bytes]
"""A tenant, and the digest of a file: nobody can tell from the time it takes what others have sent."""


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


class HeldPictures:
    """Those of one model. Any thread may use it."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._lock = threading.Lock()
        self._held = dict[SharedData, str]()  # with their tenants; without the lock, since pictures go at any time
        self._gone = deque[tuple[str, int]]()  # what is still counted: tenants and bytes
        self._num_bytes, self._num_pictures = Counter[str](), Counter[str]()  # of tenants
        self._all_bytes = self._num_all = self._kept_bytes = 0
        self._kept = OrderedDict[Key, ReadPicture]()  # the least recently used first
        self._faults = OrderedDict[Key, tuple[ReadPicture, float]]()  # until when; the oldest first

    def find(self, key: Key) -> ReadPicture | None:
        """What is kept of a file, also if that is a fault; None: nothing."""
        with self._lock:
            fault, until = self._faults.get(key, (None, 0.0))
            if time.monotonic() < until:
                return fault
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def keep_fault(self, key: Key, fault: ReadPicture) -> None:
        """Remember for a while that a file has a fault: to find that may take long, or the life of a process."""
        with self._lock:
            self._faults.pop(key, None)
            self._faults[key] = fault, time.monotonic() + FAULTS_S
            if len(self._faults) > MAX_FAULTS:
                self._faults.popitem(last=False)

    def hold(self, key: Key, made: Made, sign: str, token_id: int, copy: Callable[[], int]) -> ReadPicture:
        """Hold a picture, and keep it for later.

        Args:
            copy: Makes memory with its values, and returns the number under which it is open.

        Raises:
            QueueFullError: There is no room.
        """
        tenant, _ = key
        with self._lock:
            self._make_room(made.num_bytes, tenant)
            fault = self._fault(made.num_bytes, tenant)
        if fault:
            raise QueueFullError(fault)
        try:
            number = copy()
        except OSError as error:
            raise QueueFullError(f"a picture cannot be held ({error.strerror}); try again in a moment") from None
        shared = SharedData(os.getpid(), number, made.num_bytes, os.fstat(number).st_ino)
        picture = Picture(token_id, made.arrays, shared=shared, grid=made.grid, is_attended=made.is_attended)
        self._held[shared] = tenant
        weakref.finalize(picture, self._release, shared).atexit = False
        found = ReadPicture(made, sign, picture)
        with self._lock:
            self._count(tenant, made.num_bytes, 1)
            if made.num_bytes <= MAX_KEPT_BYTES:
                self._kept[key] = found
                self._kept_bytes += made.num_bytes
            while self._kept_bytes > MAX_KEPT_BYTES:
                self._drop(next(iter(self._kept)))
        return found

    def _make_room(self, num_bytes: int, tenant: str) -> None:
        """Keep less, so that one more can be held."""
        own = (key for key in list(self._kept) if key[0] == tenant)
        while self._fault(num_bytes, tenant) and (key := next(own, None)):
            self._drop(key)
        if not self._fault(num_bytes, tenant, self._kept_bytes, len(self._kept)):
            while self._fault(num_bytes, tenant) and self._kept:
                self._drop(next(iter(self._kept)))

    def _drop(self, key: Key) -> None:
        self._kept_bytes -= self._kept.pop(key).made.num_bytes

    def _count(self, tenant: str, num_bytes: int, number: int) -> None:
        self._num_bytes[tenant] += num_bytes
        self._num_pictures[tenant] += number
        self._all_bytes += num_bytes
        self._num_all += number

    def _fault(self, num_bytes: int, tenant: str, kept_bytes: int = 0, num_kept: int = 0) -> str | None:
        """Why there is no room for one more if so much of others goes; None: there is."""
        while self._gone:
            owner, size = self._gone.popleft()
            self._count(owner, -size, -1)
        own_bytes, num_own = self._num_bytes[tenant], self._num_pictures[tenant]
        num_left = MAX_HELD_BYTES - self._all_bytes + kept_bytes
        if own_bytes + num_bytes > num_left:
            bound = f"pictures of at most {MAX_HELD_BYTES} bytes may be held at once, by one key as many as are left"
            return f"{bound}: it holds {own_bytes}, {num_left} are left, and one has {num_bytes}; try again in a moment"
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE_OF_FILES
        if num_own >= most - self._num_all + num_kept:
            bound = f"at most {most} pictures may be held at once, by one key as many as are left"
            return f"{bound}: it holds {num_own}; try again in a moment"
        return None

    def forget(self) -> None:
        """Keep none."""
        with self._lock:
            self._kept.clear()
            self._faults.clear()
            self._kept_bytes = 0

    def _release(self, shared: SharedData) -> None:
        """Called when nobody has the picture any more; the engine has taken its values, or never will."""
        self._gone.append((self._held.pop(shared), shared.num_bytes))  # the lock may be this thread's
        os.close(shared.number)
