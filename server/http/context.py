"""Holds what every route needs in one frozen object. The app owns it; there are no globals."""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice

from starlette.requests import Request

from weft.server.errors import InvalidRequestError, ModelNotFoundError, shown
from weft.server.http.auth import ADMIN_PATHS
from weft.server.http.limits import Lifecycle, Workers
from weft.server.http.metrics import Metrics
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


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Everything that routes use.

    Attributes:
        models: The served models by name. The first one serves requests that name none.
        created: Creation time of the models, in seconds since 1970.
    """

    models: Mapping[str, ServedModel]
    settings: Settings
    fleet: Fleet
    lifecycle: Lifecycle
    metrics: Metrics
    workers: Workers
    store: Store
    created: int

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
