"""Makes responses in the background: their events go to a log in the store, and every reader follows that log.

The process that made the response, a stream that began with it and a later replay read the same bytes. Whoever deletes
the stored response or marks it as cancelled stops it, from any server process.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from weft.server.apis.responses.render import ResponseRenderer, error_event
from weft.server.apis.responses.stored import RESPONSE, StoredResponse, extend, is_cancelled, is_written, load_response
from weft.server.apis.responses.tool_rounds import ToolRounds
from weft.server.errors import ApiError, as_api_error
from weft.server.generate.answer import Answer
from weft.server.http.context import ServerContext
from weft.server.http.sse import EventStream, encode_event
from weft.server.store.transaction import Row, Transaction

WRITE_EVERY_S = 0.2
"""How often events are written, and how often a reader looks for them."""
BEAT_EVERY_S = 5.0
"""How often the response itself is written, which says as well that it is still being made."""
_PAGE = 256
_LAST = tuple(f"event: response.{status}\n".encode() for status in ("completed", "incomplete", "failed"))

_log = logging.getLogger(__name__)


class BackgroundRun:
    """One response that is being made. Owns its answer, which it closes."""

    def __init__(
        self,
        answer: Answer | ToolRounds,
        renderer: ResponseRenderer,
        stored: StoredResponse,
        tenant: str,
        first_events: bytes,
    ) -> None:
        """Take an open answer, and the response as it was stored."""
        self._answer = answer
        self._renderer = renderer
        self._stored = stored
        self._tenant = tenant
        self._events = _split(first_events)
        self._error: ApiError | None = None
        self._num_written = 0
        self._next_beat_s = 0.0

    def start(self, context: ServerContext) -> None:
        """Run on the event loop. The server counts it as a request until it ends."""
        context.lifecycle.enter()
        self._generating = asyncio.create_task(self._generate())
        self._running = asyncio.create_task(self._run(context))
        context.lifecycle.background[self._stored.id] = self.stop  # the event loop alone would not keep it

    async def stop(self) -> None:
        """End now, as the store says that the response is deleted or cancelled. Returns when that is done."""
        self._generating.cancel()
        await asyncio.wait({self._running})

    async def _run(self, context: ServerContext) -> None:
        try:
            while await self._write(context):
                await asyncio.wait({self._generating}, timeout=WRITE_EVERY_S)
                if self._generating.done():
                    break
            await self._end_generating()
            await self._write(context, is_last=True)
        except Exception:
            _log.exception("a response in the background could not be stored")
        finally:
            await self._end_generating()
            self._answer.close()
            del context.lifecycle.background[self._stored.id]
            context.lifecycle.leave()

    async def _generate(self) -> None:
        try:
            async with aclosing(self._answer.rendered(self._renderer.stream)) as events:
                async for data in events:
                    self._events += _split(data)
        except Exception as exc:
            self._error = as_api_error(exc)

    async def _end_generating(self) -> None:
        self._generating.cancel()
        await asyncio.gather(self._generating, return_exceptions=True)

    async def _write(self, context: ServerContext, *, is_last: bool = False) -> bool:
        """Write new events, and with the last ones the response; False: it is not wanted any more."""
        events, id, tenant = list(self._events), self._stored.id, self._tenant
        has_beat = is_last or time.monotonic() >= self._next_beat_s
        if has_beat and not is_last:  # until its last event is written it is not complete
            self._stored.response = {**msgspec.to_builtins(self._renderer.response), "status": "in_progress"}
            self._next_beat_s = time.monotonic() + BEAT_EVERY_S

        def work(transaction: Transaction) -> bool:
            if not is_written(transaction, id, tenant):
                return False
            if is_last:
                events.extend(_split(self._end(transaction)))
            elif is_cancelled(transaction, id, tenant):
                return False
            if events:
                transaction.append_events(Row(RESPONSE, id, tenant, b""), self._num_written, events)
            if has_beat:
                transaction.put(self._stored.row(tenant))
            return True

        is_wanted = await (context.store.write if events or has_beat else context.store.read)(work)
        if is_wanted:
            self._num_written += len(events)
            del self._events[: len(events)]
        return is_wanted

    def _end(self, transaction: Transaction) -> bytes:
        """Add the response to its conversation, and finish it; it may become a failure. Returns its last events."""
        response = self._renderer.response
        if is_cancelled(transaction, self._stored.id, self._tenant):
            last = self._renderer.stream_cancelled()
        else:
            try:
                if self._error is None:
                    extend(transaction, self._tenant, msgspec.to_builtins(response), self._stored.input)
            except ApiError as error:
                self._error = error
            last = self._renderer.stream_error(self._error) if self._error else self._renderer.stream_end()
        self._stored.response = msgspec.to_builtins(response)
        return last


async def follow(context: ServerContext, response_id: str, tenant: str, after: int) -> AsyncGenerator[bytes, None]:
    """Yield the events of a response with numbers above `after`, until it is done; if it is deleted, an error."""
    is_done = False
    while not is_done:
        try:
            events, is_done = await context.store.read(partial(_next_events, response_id, tenant, after))
        except ApiError as error:
            yield error_event(error, after + 1)
            return
        for number, data in events:
            after = number
            yield data
        if not events and not is_done:
            await asyncio.sleep(WRITE_EVERY_S)


def _next_events(
    response_id: str, tenant: str, after: int, transaction: Transaction
) -> tuple[Sequence[tuple[int, bytes]], bool]:
    """Events with numbers above `after`, and whether no others come after them. Reads the response only at its end."""
    events = transaction.events(response_id, after=after, limit=_PAGE)
    newest = events[-1:] or transaction.events(response_id, limit=1, order="desc")
    if newest and newest[0][1].startswith(_LAST):
        return events, True
    if events or is_written(transaction, response_id, tenant):
        return events, False
    number = newest[0][0] + 1 if newest else 0  # its process died, so this event is not stored
    last = _last_event(load_response(transaction, response_id, tenant).response, number)
    return [(number, last)] if number > after else [], True


def _last_event(response: dict[str, Any], number: int) -> bytes:
    status = response["status"]
    kind = f"response.{'incomplete' if status == 'cancelled' else status}"
    return encode_event({"type": kind, "sequence_number": number, "response": response}, kind)


def _split(data: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in data.split(b"\n\n") if event]


def followed(context: ServerContext, response_id: str, tenant: str, after: int, headers: dict[str, str]) -> Response:
    """The events of a background response as a stream."""
    events = follow(context, response_id, tenant, after)
    return EventStream(
        events, lambda: b"", error_event, headers=headers, ping_s=context.settings.sse_ping_s, close=lambda: None
    )
