"""Holds what every route needs in one frozen object, and begins a stream in time while its answer is prepared.

The app owns the object; there are no globals. A stream that is begun early sends keep-alives until its answer is there.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from typing import Annotated, Any, Protocol

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.errors import ApiError, InvalidRequestError, ModelNotFoundError, shown
from weft.server.http.auth import ADMIN_PATHS
from weft.server.http.form import FileRoom
from weft.server.http.limits import Lifecycle, Workers
from weft.server.http.metrics import Metrics
from weft.server.http.sse import DATA_ONLY, EventStream, Framing
from weft.server.models.engine_client import EngineClient
from weft.server.models.fleet import Fleet
from weft.server.models.served_model import ServedModel
from weft.server.settings import Settings
from weft.server.store.store import Store

VERSION = version("weft")
MAX_NAMES = 100
"""Most names that a message lists."""
MAX_NAME_CHARS = 256
"""Longest model name that is not a served one. Every chunk of a stream repeats the name."""
MAX_DECODERS = 4


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Everything that routes use.

    Attributes:
        models: The served models by name. The first one serves requests that name none.
        created: Creation time of the models, in seconds since 1970.
        decoders: Places for processes that decode sound.
        files: Room for what they read and make.
    """

    models: Mapping[str, ServedModel]
    settings: Settings
    fleet: Fleet
    lifecycle: Lifecycle
    metrics: Metrics
    workers: Workers
    store: Store
    created: int
    decoders: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_DECODERS))
    files: FileRoom = field(default_factory=FileRoom)

    @property
    def default_model(self) -> ServedModel:
        """The model for requests that name none, and for reports about the whole server."""
        return next(iter(self.models.values()))

    @property
    def engine_clients(self) -> Collection[EngineClient]:
        """Each engine that is always loaded once, in the order of the models; several names may share an engine."""
        return dict.fromkeys(model.engine_client for model in self.models.values() if not model.on_demand)

    async def meet_engines(self) -> None:
        """Wait for the first handshake with each engine that is ready. For reports about the whole server."""
        await asyncio.gather(*(c.meet() for c in dict.fromkeys(m.engine_client for m in self.models.values())))

    async def check_model(self, request: Request, name: str | None) -> ServedModel:
        """Find the model for a name, and have it loaded. Of one that is always loaded, wait for the first handshake.

        None finds the default model. The answer repeats the requested name, and its headers hold the model's own.

        Raises:
            InvalidRequestError: The name is too long to be repeated in every chunk.
            ModelNotFoundError: The model is not served here.
            ModelLoadingError: It is not loaded in time.
            ModelFailedError: It cannot be loaded.
        """
        model = self.find_model(request, name)
        await model.engine_client.load()
        return model

    def is_loaded(self, name: str | None) -> bool:
        """Whether a request to the model of that name need not wait until it is loaded; also if there is none."""
        model = self.default_model if name is None else self.models.get(name)
        return model is None or not model.on_demand or self.fleet.read().models[model.name].state == "ready"

    def find_model(self, request: Request, name: str | None) -> ServedModel:
        """As `check_model`, but whether it is loaded or not. In one request a name always means the same model."""
        found: dict[str | None, ServedModel] = request.scope.setdefault("weft.models", {})
        if name not in found:  # its alias may be given to another model while it waits
            found[name] = self._find_model(self._known(request, name), request.scope["path"])
        request.state.model_name = found[name].name
        return found[name]

    def _known(self, request: Request, name: str | None) -> str | None:
        if name not in self.models and name is not None and request.scope["path"].startswith("/api/"):
            return name.removesuffix(":latest")  # Ollama's clients add it
        return name

    def _find_model(self, name: str | None, path: str) -> ServedModel:
        if name is None:
            return self.default_model
        if name in self.models:
            return self.models[name]
        if self.settings.any_model_name and path not in ADMIN_PATHS:  # a slip must not unload another model
            if len(name) > MAX_NAME_CHARS:
                message = f"model must have at most {MAX_NAME_CHARS} characters, got {len(name)}"
                raise InvalidRequestError(message, param="model")
            return self.default_model
        served = ", ".join(islice(self.models, MAX_NAMES)) + ", ..." * (len(self.models) > MAX_NAMES)
        raise ModelNotFoundError(f"the model {shown(name)} does not exist; served here: {served}", param="model")


async def get_context(request: Request) -> ServerContext:
    """The app's context. Used with Depends; async because Depends would call a plain function in a thread."""
    context: ServerContext = request.app.state.context
    return context


Context = Annotated[ServerContext, Depends(get_context)]
"""Of a handler: the app's context."""


class Asks(Protocol):
    """A body, as far as `early_headers_while_loading` reads it."""

    @property
    def model(self) -> str | None:
        """The name of the model; None: the first."""

    @property
    def stream(self) -> bool | None:
        """Whether the answer is a stream."""


async def early_headers_while_loading(
    work: Coroutine[Any, Any, Response],
    body: Asks,
    context: ServerContext,
    error: Callable[[ApiError], bytes],
    framing: Framing = DATA_ONLY,
) -> Response:
    """As `with_early_headers` for a stream of a model that is yet to be loaded; else what `work` makes."""
    if not body.stream or context.is_loaded(body.model):
        return await work
    return await with_early_headers(work, error, context.settings.sse_ping_s, framing)


async def with_early_headers(
    work: Coroutine[Any, Any, Response], error: Callable[[ApiError], bytes], ping_s: float, framing: Framing = DATA_ONLY
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


def _stream_of(response: Response) -> EventStream:
    assert isinstance(response, EventStream), "streams alone are begun before they are made"
    return response
