"""Threads for work that would block the event loop, and with it every stream.

Owns two pools. Long work has threads of its own, so that it delays only other long work. It waits in a bounded queue;
cancelling the waiter removes it, and all that it holds, from the queue. Work that has begun runs to its end even if
its waiter is cancelled. Memory that long work has freed is returned to the system.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from weft.server.errors import QueueFullError
from weft.server.text.memory import return_free_memory

SHORT_SIZE = 4096
"""Characters or bytes. Work on shorter input runs on the event loop."""
LIGHT_SIZE = 64 << 10
"""The same bound for light work."""
LONG_SIZE = 256 << 10
"""Work on input of this size or more is long."""
MAX_NUM_LONG = 64
"""Most pieces of long work at a time."""

T = TypeVar("T")


class Workers:
    """The threads of one server process."""

    def __init__(self) -> None:
        """Threads start when they are first needed."""
        self._usual = ThreadPoolExecutor(4, "usual")
        self._long = ThreadPoolExecutor(2, "long")
        self._num_long = 0

    async def run(self, size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function on input of `size` characters or bytes, in a thread unless the input is short.

        Raises:
            QueueFullError: Too much long work is waiting.
        """
        if size < SHORT_SIZE:
            return function(*args, **kwargs)
        call = partial(function, *args, **kwargs)
        if size < LONG_SIZE:
            return await _run(self._usual, call)
        if self._num_long >= MAX_NUM_LONG:
            raise QueueFullError(f"at most {MAX_NUM_LONG} long requests may be prepared at once; try again in a moment")
        self._num_long += 1
        try:
            return await _run(self._long, partial(_tidily, call))
        finally:
            self._num_long -= 1

    async def run_light(self, size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`run` for work that takes little time for its size, such as parsing."""
        return await self.run(size if size >= LIGHT_SIZE else 0, function, *args, **kwargs)


async def _run(threads: ThreadPoolExecutor, call: Callable[[], T]) -> T:
    calls = [call]  # the pool's queue keeps cancelled work, so it must not hold the call itself
    del call
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: calls.pop()())
    finally:
        calls.clear()


def _tidily(call: Callable[[], T]) -> T:
    try:
        return call()
    finally:
        return_free_memory()
