"""What every route needs, in one frozen object that the app owns: there are no globals."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from starlette.requests import Request

from weft.server.errors import InvalidRequestError, ModelNotFoundError, shown
from weft.server.http.lifecycle import Lifecycle
from weft.server.http.metrics import Metrics
from weft.server.http.workers import Workers
from weft.server.model.served_model import ServedModel
from weft.server.settings import Settings

VERSION = version("weft")
MAX_NAME_CHARS = 256
"""Of a model name that is not one of ours: every chunk of a stream repeats it."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Everything that routes use.

    Attributes:
        models: What clients may ask for, by name; the first one serves those who name none.
        created: Seconds since 1970, said of the models.
    """

    models: Mapping[str, ServedModel]
    settings: Settings
    lifecycle: Lifecycle
    metrics: Metrics
    workers: Workers
    created: int

    @property
    def default_model(self) -> ServedModel:
        """For requests that name none, and for what is said of the server as a whole."""
        return next(iter(self.models.values()))

    def check_model(self, name: str | None) -> ServedModel:
        """Find a model; it answers under the name that it was asked for by, if any.

        Raises:
            InvalidRequestError: The name is too long to be repeated in every chunk.
            ModelNotFoundError: The model is not served here.
        """
        if name is None:
            return self.default_model
        if name in self.models:
            return self.models[name]
        if self.settings.any_model_name:
            if len(name) > MAX_NAME_CHARS:
                message = f"model must have at most {MAX_NAME_CHARS} characters, got {len(name)}"
                raise InvalidRequestError(message, param="model")
            return self.default_model
        served = ", ".join(self.models)
        raise ModelNotFoundError(f"the model {shown(name)} does not exist; served here: {served}", param="model")


async def get_context(request: Request) -> ServerContext:
    """The context of the app that serves this request, once it has met its engines that are ready.

    For Depends, which calls plain functions in a thread.
    """
    context: ServerContext = request.app.state.context
    for model in context.models.values():
        await model.engine_client.meet()
    return context
