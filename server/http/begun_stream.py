"""Begins a stream in time: keep-alives are sent while the answer that it streams is still being prepared."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response

from weft.server.errors import ApiError
from weft.server.http.context import ServerContext
from weft.server.http.sse import DATA_ONLY, EventStream, Framing


async def begun_in_time(
    work: Coroutine[Any, Any, Response],
    error: Callable[[ApiError], bytes],
    ping_s: float,
    framing: Framing = DATA_ONLY,
) -> Response:
    """The stream that `work` makes; if that takes longer than `ping_s` (0: without end), one that is begun before.

    An error of `work` is raised, or is the end of a stream that was begun.
    """
    making = asyncio.create_task(work)

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(_stream_of(await making).events) as made:
            async for data in made:
                yield data

    def failed(exc: ApiError) -> bytes:
        return error(exc) if making.exception() else _stream_of(making.result()).error(exc)

    def close() -> None:
        if not (making.cancel() or making.cancelled() or making.exception()):
            _stream_of(making.result()).close()

    try:
        await asyncio.wait([making], timeout=ping_s or None)
    except asyncio.CancelledError:
        close()
        raise
    if making.done():
        return making.result()
    return EventStream(
        events(),
        lambda: _stream_of(making.result()).end(),
        failed,
        headers={},
        ping_s=ping_s,
        close=close,
        framing=framing,
    )


class Asks(Protocol):
    """A body, as far as this module reads it."""

    @property
    def model(self) -> str | None:
        """The name of the model; None: the first."""

    @property
    def stream(self) -> bool | None:
        """Whether the answer is a stream."""


async def begun_while_loading(
    work: Coroutine[Any, Any, Response],
    body: Asks,
    context: ServerContext,
    error: Callable[[ApiError], bytes],
    framing: Framing = DATA_ONLY,
) -> Response:
    """As `begun_in_time`, if the body wants a stream of a model that is yet to be loaded; else what `work` makes."""
    if not body.stream or context.is_loaded(body.model):
        return await work
    return await begun_in_time(work, error, context.settings.sse_ping_s, framing)


def _stream_of(response: Response) -> EventStream:
    assert isinstance(response, EventStream), "streams alone are begun before they are made"
    return response
