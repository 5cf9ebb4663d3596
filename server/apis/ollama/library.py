"""The routes by which Ollama's clients fetch and remove models: /api/pull and /api/delete, and what is in the library.

What a server serves is settled when it starts. A model that is fetched here is there for the next start, and the
stream of its fetching says so. Names are those of the hub and short ones: no addresses and no folders, so that nobody
makes this machine ask others. Whether all this is allowed is the operator's decision (`api_pulls`).
"""

import asyncio
import hashlib
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from weft.engine.wire.waiting_threads import WaitingThreads
from weft.server.apis.ollama.body import FRAMING, ShowBody, time_text
from weft.server.apis.openai.pages import json_answer
from weft.server.errors import ApiError, InvalidRequestError, ModelNotFoundError, NotAllowedError
from weft.server.http.auth import listens_on_loopback
from weft.server.http.context import Context, ServerContext
from weft.server.http.middleware import ollama_error
from weft.server.http.sse import EventStream
from weft.server.library import hub, library
from weft.server.library.contents import Facts, facts_of, weights_of
from weft.server.library.download import LibraryError, NotHereError, Remote
from weft.server.library.names import OnHub, elsewhere
from weft.server.settings import Settings
from weft.server.task.body import AnyTypeRoute
from weft.server.task.validation import ignored_fields, ignored_header

T = TypeVar("T")

_TELL_EVERY_S = 0.2
_PULLS = WaitingThreads("pull", 4)
"""A download waits for others here, for a lock and for the network."""
_LOOKS = WaitingThreads("library", 4)
_END = {"status": "success"}

router = APIRouter(route_class=AnyTypeRoute)


class PullBody(ShowBody):
    """The body of POST /api/pull. Without `stream` the answer is streamed."""

    stream: bool | None = None


class _LeftError(Exception):
    """Nobody waits for the download any more."""


class _Pull:
    """A download in a thread, and what has come of it since somebody last looked."""

    def __init__(self, source: OnHub) -> None:
        self._changed: dict[str, dict[str, object]] = {}
        self._lock = threading.Lock()
        self._is_unwanted = False
        get = partial(library.get, source, self._report, refresh=True)
        self.future = asyncio.wrap_future(_PULLS.submit(get))

    def _report(self, remote: Remote, num_bytes: int) -> None:
        if self._is_unwanted:
            raise _LeftError
        short = remote.digest.partition(":")[2][:12]
        status = {"status": f"pulling {short}", "digest": remote.digest, "total": remote.size}
        with self._lock:
            self._changed[remote.name] = {**status, "completed": num_bytes}

    def changes(self) -> list[dict[str, object]]:
        """The latest state of each file of which more has arrived."""
        with self._lock:
            changed, self._changed = self._changed, {}
        return [*changed.values()]

    def leave(self) -> None:
        """End it at the next byte; what has arrived is kept."""
        self._is_unwanted = True
        self.future.cancel()


@router.post("/api/pull")
async def pull(body: PullBody, context: Context) -> Response:
    """Fetch a model of the hub into the library, and tell in JSON lines how far it is."""
    name, source, ignored = _asked(body, context.settings)
    pulling = _Pull(source)
    if body.stream is False:
        try:
            await _wait(pulling)
        finally:
            pulling.leave()
        return json_answer(_END, ignored)
    note = {"status": f"{name} is in the library; this server serves what it was started with: weft serve {name}"}

    async def lines() -> AsyncGenerator[bytes, None]:
        yield _line({"status": "pulling manifest"})
        while not pulling.future.done():
            await asyncio.wait([pulling.future], timeout=_TELL_EVERY_S)
            for status in pulling.changes():
                yield _line(status)
        await _wait(pulling)
        if name not in context.models:
            yield _line(note)

    def failed(error: ApiError) -> bytes:
        return ollama_error(error) + b"\n"

    end = partial(_line, _END)
    return EventStream(lines(), end, failed, headers=ignored, ping_s=0, close=pulling.leave, framing=FRAMING)


@router.delete("/api/delete")
async def delete(body: ShowBody, context: Context) -> Response:
    """Remove a model from the library, unless it is served here."""
    name, source, ignored = _asked(body, context.settings)
    if name in context.models or await _called(partial(_is_served, source, context.settings)):
        raise InvalidRequestError(f"{name} is served here: end the server before it is removed", param="model")
    try:
        await _called(partial(library.remove, source))
    except NotHereError as error:
        raise ModelNotFoundError(str(error), param="model") from None
    except LibraryError as error:
        raise InvalidRequestError(str(error), param="model") from None
    return Response(headers=ignored)


def may_pull(settings: Settings) -> bool:
    """Whether clients may change the library; by default only those of this machine, if nobody else can ask."""
    if settings.api_pulls is not None:
        return settings.api_pulls
    is_open = settings.api_key or settings.allowed_hosts or settings.cors_origins
    return not is_open and listens_on_loopback(settings.host)


def card(name: str, facts: Facts, family: str = "") -> dict[str, Any]:
    """A model in the lists of /api/tags and /api/ps."""
    return {
        "name": name,
        "model": name,
        "modified_at": time_text(facts.modified),
        "size": facts.size_bytes,
        "digest": hashlib.sha256(name.encode("utf-8", "replace")).hexdigest(),
        "details": details(facts, family),
    }


def details(facts: Facts, family: str) -> dict[str, Any]:
    """What a model's files are."""
    return {
        "parent_model": "",
        "format": facts.format,
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": facts.quantization,
    }


@lru_cache(maxsize=64)
def served_facts(folder: str | None) -> Facts:
    """Those of a served model, whose files stay as they are."""
    return facts_of(Path(folder)) if folder else Facts(0, "safetensors", "", 0.0)


async def cards_of_library(context: ServerContext) -> list[dict[str, Any]]:
    """The models of the library that are not served here; none if clients may not change it."""
    return [card(entry.name, entry.facts) for entry in await _entries(context) if entry.name not in context.models]


async def shown_of_library(context: ServerContext, name: str | None) -> dict[str, Any] | None:
    """The answer of /api/show for a model that is in the library and not served; None: there is none."""
    entries = [] if name in context.models else await _entries(context)
    facts = next((entry.facts for entry in entries if entry.name == name), None)
    if facts is None:
        return None
    nothing = {"modelfile": "", "parameters": "", "template": "", "model_info": {}, "capabilities": []}
    return {**nothing, "details": details(facts, ""), "modified_at": time_text(facts.modified)}


async def _entries(context: ServerContext) -> list[library.Entry]:
    return await _called(lambda: list(library.entries())) if may_pull(context.settings) else []


def _asked(body: ShowBody, settings: Settings) -> tuple[str, OnHub, dict[str, str]]:
    """The name in a body, the model that it means, and the header that tells what is ignored."""
    if not may_pull(settings):
        raise NotAllowedError("models are not fetched or removed over HTTP here: set api_pulls to allow it")
    ignored = ignored_header(ignored_fields(body, {}, strict=settings.strict_params))
    if not (name := body.model or body.name):
        raise InvalidRequestError("model must name a model, got none", param="model")
    try:
        source = elsewhere(name)
    except LibraryError as error:
        raise ModelNotFoundError(str(error), param="model") from None
    if not isinstance(source, OnHub):
        raise InvalidRequestError(f"model must be one of the hub, got {name[:200]}", param="model")
    return name, source, ignored


def _is_served(source: OnHub, settings: Settings) -> bool:
    """Whether a served model or draft would be removed with a model, by where its weights lie in the end."""
    each_own = map(settings.for_model, settings.fleet)
    places = [Path(place) for own in each_own for place in (own.model, own.speculative) if place]
    served = {file.resolve() for place in places for file in weights_of(place)}
    if source.file is None:
        folder = hub.repository_folder(source.repository).resolve()
        return any(folder in file.parents for file in served)
    place = library.find(source)
    return place is not None and any(file.resolve() in served for file in weights_of(place))


async def _called(function: Callable[[], T]) -> T:
    return await asyncio.wrap_future(_LOOKS.submit(function))


async def _wait(pulling: _Pull) -> None:
    """The end of a download; its faults are the caller's to know."""
    try:
        await pulling.future
    except LibraryError as error:
        raise InvalidRequestError(str(error), param="model") from None


def _line(status: Mapping[str, object]) -> bytes:
    return msgspec.json.encode(status) + b"\n"
