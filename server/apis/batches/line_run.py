"""Answers the lines of one batch through the application's own routes, and keeps each result in the journal.

The caller owns the journal and the places for lines. It decides when to stop: it cancels `LineRun.feed`, then waits for
`LineRun.settle`. So what was acknowledged is never lost, and no line is answered twice.
"""

import asyncio
import logging
import pathlib
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.types import ASGIApp, Message

from weft.server.apis.batches.lines import InputLine, Journal, read_lines, take_piece
from weft.server.errors import ModelFailedError, StorageError
from weft.server.http.auth import BATCH_TENANT
from weft.server.http.context import ServerContext

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the application answered."""

    status: int
    request_id: str
    body: bytes


async def call(app: ASGIApp, path: str, body: bytes, tenant: str) -> Reply:
    """POST a JSON body for a tenant inside this process, through the same routes and checks as any client's.

    Cancelling it is a client that leaves.
    """
    asked, status, headers, parts = False, 500, {}, []

    async def receive() -> Message:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()  # nobody leaves
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(message["headers"])
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": {},
        BATCH_TENANT: tenant,
    }
    await app(scope, receive, send)
    return Reply(status, headers.get(b"x-request-id", b"").decode(), b"".join(parts))


class Slots:
    """A fixed number of places for the lines that run at once. Used on one event loop.

    A free one goes to the batch with the fewest lines running. So a batch gets its share however long the lines of
    others are.
    """

    def __init__(self, count: int) -> None:
        """All are free."""
        self._num_free = count
        self._held: Counter[Hashable] = Counter()
        self._waiting: dict[asyncio.Future[None], Hashable] = {}  # in the order of arrival

    async def take(self, owner: Hashable) -> None:
        """Wait for a place. Whoever is cancelled meanwhile holds none."""
        place = asyncio.get_running_loop().create_future()
        self._waiting[place] = owner
        self._hand_out()
        try:
            await place
        except asyncio.CancelledError:
            if self._waiting.pop(place, None) is None:  # it came at the same moment
                self.give_back(owner)
            raise

    def give_back(self, owner: Hashable) -> None:
        """Give a place back."""
        self._num_free += 1
        self._held[owner] -= 1
        self._held += Counter()  # forgets who holds none
        self._hand_out()

    def _hand_out(self) -> None:
        while self._num_free and (waiting := [place for place in self._waiting if not place.done()]):
            place = min(waiting, key=lambda place: self._held[self._waiting[place]])  # of equals the first
            self._held[self._waiting.pop(place)] += 1
            self._num_free -= 1
            place.set_result(None)


ROOM_PAUSE_S = 2.0
"""Between two tries to keep a result on a full disk."""
LONGEST_PAUSE_S = 30.0
"""Between two tries of a request that the server is too busy for."""
_BUSY = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class LineSource:
    """An input whose faults have been looked for.

    Attributes:
        batch_id: What the ids of results are made of.
        endpoint: The route that all lines go through.
        tenant: Whose lines they are.
    """

    batch_id: str
    path: pathlib.Path
    endpoint: str
    tenant: str


class LineRun:
    """One pass over an input. Used on one event loop."""

    def __init__(
        self, source: LineSource, app: ASGIApp, context: ServerContext, slots: Slots, journal: Journal
    ) -> None:
        """Lines go through app, as many at once as slots has places."""
        self.source = source
        self._app = app
        self._store = context.store
        self._max_bytes = context.settings.max_body_bytes
        self._slots = slots
        self._journal = journal
        self._appends: set[asyncio.Task[None]] = set()

    async def feed(self) -> None:
        """Answer every line that has no result."""
        try:
            async with asyncio.TaskGroup() as answers:
                async for number, line in self._lines():
                    if number not in self._journal.done:
                        await self._slots.take(self)
                        answers.create_task(self._answer(number, line))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def settle(self) -> None:
        """Wait for the results that are being written. Then the journal may be closed."""
        await asyncio.gather(*self._appends, return_exceptions=True)

    async def _lines(self) -> AsyncIterator[tuple[int, bytes]]:
        source = read_lines(self.source.path, self._max_bytes)
        while piece := await self._store.run(partial(take_piece, source)):
            for item in piece:
                yield item

    async def _answer(self, number: int, line: bytes) -> None:
        """Answer one line, and keep the result. Gives the slot back."""
        batch_id = self.source.batch_id
        try:
            given = msgspec.json.decode(line, type=InputLine)
            try:
                reply = await self._ask(bytes(given.body))
                result = _result(batch_id, number, given.custom_id, reply)
                await self._append(result, is_error=reply.status >= 400)
            except Exception:
                _log.exception("line %d of %s could not be answered", number, batch_id)
                error = {"code": "internal_error", "message": "the line could not be answered", "line": number}
                result = encode_result(batch_id, number, given.custom_id, None, error)
                await self._append(result, is_error=True)
        finally:
            self._slots.give_back(self)

    async def _ask(self, body: bytes) -> Reply:
        """The answer to one line; asks again as long as the server is too busy."""
        pause_s = 0.5
        while (reply := await call(self._app, self.source.endpoint, body, self.source.tenant)).status in _BUSY:
            error = msgspec.json.decode(reply.body)["error"]
            if ModelFailedError.code in (error.get("code"), error.get("details", {}).get("error_code")):
                break  # it may fail for ever, and others need the place
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return reply

    async def _append(self, result: bytes, *, is_error: bool) -> None:
        """Keep a result, also if that has to wait for room on the disk."""
        while True:
            try:
                keep = partial(self._journal.append, [result], is_error=is_error)
                appending = asyncio.create_task(self._store.run(keep))
                self._appends.add(appending)
                appending.add_done_callback(self._appends.discard)
                return await asyncio.shield(appending)  # a line that is cancelled does not end it
            except StorageError:
                await asyncio.sleep(ROOM_PAUSE_S)


def _result(batch_id: str, number: int, custom_id: str, reply: Reply) -> bytes:
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": msgspec.Raw(reply.body)}
    error = None
    if reply.status >= 400:
        told = msgspec.json.decode(reply.body).get("error", {})
        error = {"code": told.get("code") or told.get("type"), "message": told.get("message"), "line": number}
    return encode_result(batch_id, number, custom_id, response, error)


def encode_result(batch_id: str, number: int, custom_id: str, response: object, error: object) -> bytes:
    """A line of the output or of the error file."""
    return (
        msgspec.json.encode(
            {"id": result_id(batch_id, number), "custom_id": custom_id, "response": response, "error": error}
        )
        + b"\n"
    )


def result_id(batch_id: str, number: int) -> str:
    """The id of a line's result, from which the journal reads the line's number."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
