"""Owns what a server process has once: its open connections, its count of requests and its threads."""

import asyncio
import logging
import resource
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from weft.engine.wire.machine import return_free_memory
from weft.engine.wire.waiting_threads import WaitingThreads
from weft.server.errors import ApiError, QueueFullError
from weft.server.settings import Settings

SHARE_OF_FILES = 0.75
MAX_NUM_EXTRA = 64
MAX_NUM_FILES = 1 << 20
"""Used for a hard limit of "unlimited"; by default the kernel allows no more."""
LOG_EVERY_S = 60.0

_log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise this process's soft limit on open files to the hard limit, and return it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (MAX_NUM_FILES if limit == resource.RLIM_INFINITY else limit for limit in limits)
    limit = max(soft, min(hard, MAX_NUM_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


class CountedConnection(Protocol):
    """A connection, as far as it is counted."""

    def drop(self) -> None:
        """Close at once."""


class Connections:
    """The open connections of one process. Each counts itself in and out.

    Connections may take a share of the file limit. Beyond it a few more are accepted for one request each, and only
    probes are served on them, so that a full server can still be monitored. If these are too many, the oldest is
    closed.
    """

    def __init__(self, settings: Settings, max_num_files: int) -> None:
        """Allow the number in the settings, but at most SHARE_OF_FILES of max_num_files."""
        self.settings = settings
        share = max(1, int(max_num_files * SHARE_OF_FILES))
        self.max_num = min(settings.max_connections or share, share)
        self._max_num_extra = max(1, min(MAX_NUM_EXTRA, max_num_files // 16))
        self._regular: set[CountedConnection] = set()
        self._extra: dict[CountedConnection, None] = {}  # the oldest first
        self._num_refused = 0
        self._next_log_time = 0.0

    def open(self, connection: CountedConnection) -> bool:
        """Count in. False: the limit is reached, and only probes may be served."""
        if len(self._regular) < self.max_num:
            self._regular.add(connection)
            return True
        if len(self._extra) >= self._max_num_extra:
            oldest = next(iter(self._extra))
            del self._extra[oldest]
            oldest.drop()
        self._extra[connection] = None
        return False

    def close(self, connection: CountedConnection) -> None:
        """Count out."""
        self._regular.discard(connection)
        self._extra.pop(connection, None)

    def note_refused(self, error: ApiError) -> None:
        """Log refused requests at most once in LOG_EVERY_S: their sender must not fill the log."""
        self._num_refused += 1
        now = time.monotonic()
        if now >= self._next_log_time:
            fields = {"num_requests": self._num_refused, "last": error.message}
            _log.warning("Refused requests that are malformed or exceed a limit", extra=fields)
            self._num_refused, self._next_log_time = 0, now + LOG_EVERY_S


class Lifecycle:
    """Whether the process still takes requests, and how many it is serving; a stream counts until its last byte.

    Owned by the app (`app.state.lifecycle`), which counts requests in and out. The process sets `draining`, which is
    never reset. Lives on one event loop; knows neither signals nor HTTP.
    """

    def __init__(self) -> None:
        self.draining = False
        self.num_active = 0
        self.unanswered: set[asyncio.Task[Any]] = set()
        """Tasks of requests whose answer has not begun. Whoever awaits a task adds and removes it."""
        self.background: dict[str, Callable[[], Awaitable[None]]] = {}
        """How to end each response that outlives its request, by its id. Whoever starts one counts it in and out."""
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """Count a request in. Pair with `leave` in a `finally`."""
        self.num_active += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count a request out."""
        assert self.num_active > 0, "leave without enter"
        self.num_active -= 1
        if self.num_active == 0:
            self._idle.set()

    def cut(self) -> None:
        """Cancel the requests whose answer has not begun."""
        for task in self.unanswered:
            task.cancel()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is being served; False if some still are after timeout_s seconds."""
        if self.num_active == 0:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


SHORT_SIZE = 4096
"""Characters or bytes. Work on shorter input runs on the event loop."""
LIGHT_SIZE = 64 << 10
"""The same bound for light work."""
LONG_SIZE = 256 << 10
"""Work on input of this size or more is long."""
MAX_NUM_LONG = 64
"""Most pieces of long work at a time."""
WORK_S = 300.0
"""How long work is waited for, its turn included."""

T = TypeVar("T")


class Workers:
    """The threads of one server process, for work that would block the event loop, and with it every stream.

    Owns two pools. Long work has threads of its own, so that it delays only other long work. It waits in a bounded
    queue; cancelling the waiter removes it, and all that it holds, from the queue. Work that has begun runs to its end
    even if its waiter is cancelled, but no waiter and no end of the process waits for it for ever. Memory that long
    work has freed is returned to the system.
    """

    def __init__(self) -> None:
        """Threads start when they are first needed."""
        self._pools = WaitingThreads("usual", 4), WaitingThreads("long", 2)
        self._of_templates = WeakKeyDictionary[object, tuple[WaitingThreads, WaitingThreads]]()
        self._num_long = 0

    async def run(self, size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function on input of `size` characters or bytes, in a thread unless the input is short.

        Raises:
            QueueFullError: Too much long work is waiting, or this is not done in time.
        """
        if size < SHORT_SIZE:
            return function(*args, **kwargs)
        return await self._run_in(self._pools, size, partial(function, *args, **kwargs))

    async def run_template(self, owner: object, size: int, function: Callable[..., T], *args: Any) -> T:
        """`run` for what renders a chat template, whatever its size, in a thread that is for this template alone.

        A template is foreign and may be slow: it holds up only those who use it, too.

        Args:
            owner: Has the template.
        """
        pools = self._of_templates.get(owner)
        if pools is None:
            pools = self._of_templates[owner] = WaitingThreads("chats", 1), WaitingThreads("long chats", 1)
        return await self._run_in(pools, size, partial(function, *args))

    async def run_light(self, size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`run` for work that takes little time for its size, such as parsing."""
        return await self.run(size if size >= LIGHT_SIZE else 0, function, *args, **kwargs)

    async def _run_in(self, pools: tuple[WaitingThreads, WaitingThreads], size: int, call: Callable[[], T]) -> T:
        usual, long = pools
        if size < LONG_SIZE:
            return await _run(usual, call)
        if self._num_long >= MAX_NUM_LONG:
            raise QueueFullError(f"at most {MAX_NUM_LONG} long requests may be prepared at once; try again in a moment")
        self._num_long += 1
        try:
            return await _run(long, partial(_tidily, call))
        finally:
            self._num_long -= 1


async def _run(threads: WaitingThreads, call: Callable[[], T]) -> T:
    future = asyncio.wrap_future(threads.submit(call))
    del call  # if this is cancelled, nothing holds it
    try:
        async with asyncio.timeout(WORK_S):  # unlike wait_for of Python 3.11, it never swallows a cancellation
            return await future
    except TimeoutError:
        raise QueueFullError(f"the request could not be prepared within {WORK_S:g} s") from None


def _tidily(call: Callable[[], T]) -> T:
    try:
        return call()
    finally:
        return_free_memory()
