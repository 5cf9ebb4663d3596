"""Makes responses in the background: their events go to a log in the store, and every reader follows that log.

The process that made the response, a stream that began with it and a later replay read the same bytes. Whoever deletes
the stored response or marks it as cancelled stops it, from any server process.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from weft.server.errors import ApiError, NotFoundError, as_api_error
from weft.server.generate.answer import Answer
from weft.server.generate.events import Renderer
from weft.server.generate.rounds import Rounds
from weft.server.http.context import ServerContext
from weft.server.store.conversations import extend
from weft.server.store.responses import StoredResponse, load
from weft.server.store.transaction import Transaction

WRITE_EVERY_S = 0.2
"""How often events are written, and how often a reader looks for them."""
BEAT_EVERY_S = 5.0
_PAGE = 256

_log = logging.getLogger(__name__)


class BackgroundRun:
    """One response that is being made. Owns its answer, which it closes."""

    def __init__(
        self,
        answer: Answer | Rounds,
        renderer: Renderer,
        stored: StoredResponse,
        tenant: str,
        first_events: bytes,
        current: Callable[[], Any],
    ) -> None:
        """Take an open answer. `current` returns the response as it is now."""
        self._answer = answer
        self._renderer = renderer
        self._stored = stored
        self._tenant = tenant
        self._current = current
        self._events = _split(first_events)
        self._error: ApiError | None = None
        self._num_written = 0
        self._next_beat_s = 0.0

    def start(self, context: ServerContext) -> None:
        """Run on the event loop. The server counts it as a request until it ends."""
        context.lifecycle.enter()
        task = asyncio.create_task(self._run(context))
        context.lifecycle.background.add(task)  # the event loop alone would not keep it
        task.add_done_callback(context.lifecycle.background.discard)

    async def _run(self, context: ServerContext) -> None:
        generating = asyncio.create_task(self._generate())
        try:
            is_wanted, is_last = True, False
            while is_wanted and not is_last:
                await asyncio.wait({generating}, timeout=WRITE_EVERY_S)
                is_last = generating.done()
                is_wanted = await self._write(context, is_last=is_last)
        except Exception:
            _log.exception("a response in the background could not be stored")
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)
            self._answer.close()
            context.lifecycle.leave()

    async def _generate(self) -> None:
        try:
            async with aclosing(self._answer.rendered(self._renderer.stream)) as events:
                async for data in events:
                    self._events += _split(data)
        except Exception as exc:
            self._error = as_api_error(exc)

    async def _write(self, context: ServerContext, *, is_last: bool) -> bool:
        """Write new events, and with the last ones the response; False: it is not wanted any more."""
        events, self._events = self._events, []
        has_beat = time.time() >= self._next_beat_s
        response = {**msgspec.to_builtins(self._current()), "status": "in_progress"}  # until its last event is written

        def work(transaction: Transaction) -> bool:
            try:
                stored = load(transaction, self._stored.id, self._tenant)
            except NotFoundError:
                return False
            if stored.is_done:
                return False
            row = stored.row(self._tenant)
            if is_last:
                stored.response, last = self._end(transaction)
                events.extend(_split(last))
            elif has_beat:
                stored.response = response
            if events:
                transaction.append_events(row, self._num_written, events)
            if is_last or has_beat:
                stored.beat = time.time()
                transaction.put(stored.row(self._tenant))
            return True

        is_wanted = await context.store.write(work) if events or has_beat or is_last else True
        self._num_written += len(events)
        if has_beat:
            self._next_beat_s = time.time() + BEAT_EVERY_S
        return is_wanted

    def _end(self, transaction: Transaction) -> tuple[Any, bytes]:
        """The finished response, which is added to its conversation, and its last event; both may be a failure's."""
        try:
            if self._error is None:
                extend(transaction, self._tenant, msgspec.to_builtins(self._current()), self._stored.input)
        except ApiError as error:
            self._error = error
        last = self._renderer.stream_error(self._error) if self._error else self._renderer.stream_end()
        return msgspec.to_builtins(self._current()), last


async def follow(context: ServerContext, response_id: str, tenant: str, after: int) -> AsyncGenerator[bytes, None]:
    """Yield the events of a response with numbers above `after`, until it is done."""
    while True:

        def work(transaction: Transaction, after: int = after) -> tuple[bool, Any]:
            is_done = load(transaction, response_id, tenant).is_done
            return is_done, transaction.events(response_id, after=after, limit=_PAGE)

        is_done, events = await context.store.write(work)
        for number, data in events:
            after = number
            yield data
        if is_done and len(events) < _PAGE:
            return
        if not events:
            await asyncio.sleep(WRITE_EVERY_S)


def _split(data: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in data.split(b"\n\n") if event]
