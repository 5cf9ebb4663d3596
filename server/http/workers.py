"""Threads for work that would hold the event loop up, which has streams to feed.

Owns two pools. Long work has threads of its own, so that it delays only what is as long; it waits in a queue that is
bounded, and whoever is cancelled while it waits takes it out of the queue, with all that it holds. What a thread has
begun goes on to its end, which nobody waits for. What a long piece of work leaves behind is given back to the system.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from weft.server.errors import QueueFullError
from weft.server.text.memory import return_free_memory

SHORT_SIZE = 4096
"""Characters, or bytes: what is shorter is worked on where it is asked for."""
LIGHT_SIZE = 64 << 10
"""The same for light work."""
LONG_SIZE = 256 << 10
"""From here on work is long."""
MAX_NUM_LONG = 64
"""Most pieces of long work that somebody waits for."""

T = TypeVar("T")


class Workers:
    """The threads of one server process."""

    def __init__(self) -> None:
        """Threads start when they are first needed."""
        self._usual = ThreadPoolExecutor(4, "usual")
        self._long = ThreadPoolExecutor(2, "long")
        self._num_long = 0

    async def run(self, size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function on input of that size, in a thread unless it is short.

        Raises:
            QueueFullError: Too much long work waits already.
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
        """The same for work that takes little time for its size, such as parsing."""
        return await self.run(size if size >= LIGHT_SIZE else 0, function, *args, **kwargs)


async def _run(threads: ThreadPoolExecutor, call: Callable[[], T]) -> T:
    calls = [call]  # the pool's queue keeps cancelled work, and so must not hold it
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
