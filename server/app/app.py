"""Builds the FastAPI application: connected models, and routes, error handlers and middleware around them.

Includes the `router` of every module of `server/apis`. Starts nothing. Routes use `app.state.context`. The process
drains `app.state.lifecycle`.
"""

import asyncio
import contextlib
import importlib
import os
import pathlib
import pkgutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weft.server import apis
from weft.server.apis.admin import status
from weft.server.apis.batches.runner import BatchRunner
from weft.server.errors import ApiError, BodyTooLargeError, RouteError
from weft.server.http import middleware
from weft.server.http.auth import AuthMiddleware, OriginMiddleware
from weft.server.http.context import VERSION, ServerContext
from weft.server.http.limits import Lifecycle, Workers
from weft.server.http.metrics import Metrics
from weft.server.models.engine_client import SocketEngineClient
from weft.server.models.fleet import Fleet
from weft.server.models.other_clients import OnDemandClient, PrefillingClient, with_prefill
from weft.server.models.served_model import LiveModels, ServedModel, served_model
from weft.server.settings import Settings
from weft.server.store.store import Store
from weft.server.supervise.runtime_folder import engine_folder
from weft.server.task.validation import as_missing_body
from weft.server.text.tokenizer import Tokenizer


def load_tokenizers(settings: Settings) -> Mapping[str, Tokenizer]:
    """The tokenizer of each model; those of one checkpoint and one chat template share theirs.

    Raises:
        TokenizerError: One cannot be read.
    """
    own = {name: settings.for_model(name) for name in settings.fleet}
    files = {name: (each.model or "", each.chat_template) for name, each in own.items()}
    loaded = {
        (folder, template): Tokenizer.load(pathlib.Path(folder), pathlib.Path(template) if template else None)
        for folder, template in dict.fromkeys(files.values())
    }
    return {name: loaded[each] for name, each in files.items()}


@contextlib.asynccontextmanager
async def connected_models(
    settings: Settings, tokenizers: Mapping[str, Tokenizer], runtime_dir: pathlib.Path
) -> AsyncIterator[tuple[Mapping[str, ServedModel], Fleet, Sequence[SocketEngineClient]]]:
    """The models by each of their names, their states, and the connections, which end with the context."""
    served, fleet = dict[str, ServedModel](), Fleet(runtime_dir, settings)
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for index, name in enumerate(settings.fleet):
            on_demand, folder = settings.fleet[name].load == "on-demand", engine_folder(runtime_dir, index)
            client = await stack.enter_async_context(SocketEngineClient(folder, on_demand=on_demand))
            clients.append(client)
            loading = OnDemandClient(name, client, fleet, settings.load_timeout_s) if on_demand else client
            own = settings.for_model(name)
            whole = with_prefill(name, loading, own)
            if isinstance(whole, PrefillingClient):
                stack.push_async_callback(whole.aclose)
            served[name] = model = served_model(whole, tokenizers[name], own, on_demand=on_demand)
            if model.pictures is not None:  # what reads them ends with the engine
                client.on_lost = model.pictures.close
        yield LiveModels(served, fleet), fleet, clients


def create_app(served: Mapping[str, ServedModel], settings: Settings, fleet: Fleet | None = None) -> FastAPI:
    """Build the application.

    Args:
        served: The served models by name; at least one.
        fleet: Their states, and how to change them; None: they stay as the settings say.
    """
    if not served:
        raise ValueError("settings.served_model_name must hold at least one name, got none")
    default = next(iter(served.values()))
    # "default" also keeps FastAPI from describing a 422, which this server never sends.
    failure = {"description": "An error", "content": {"application/json": {"schema": _error_schema()}}}
    app = FastAPI(
        title="Weft",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        responses={"default": failure},
        lifespan=_run_batches,
    )
    app.state.lifecycle = Lifecycle()
    fleet = fleet or Fleet(pathlib.Path(os.devnull), settings)
    app.state.context = ServerContext(
        models=served,
        settings=settings,
        fleet=fleet,
        lifecycle=app.state.lifecycle,
        metrics=Metrics(served.values(), fleet, settings.metrics_prefix),
        workers=Workers(),
        store=Store(settings),
        created=int(time.time()),
    )
    for router in find_routers():
        app.include_router(router)
    # The middleware that is added last is the outermost.
    app.add_middleware(
        middleware.BodyLimitMiddleware, max_body_bytes=settings.max_body_bytes, max_file_bytes=settings.max_file_bytes
    )
    app.add_middleware(middleware.DrainMiddleware, lifecycle=app.state.lifecycle)
    app.add_middleware(
        AuthMiddleware,
        keys=settings.api_key,
        admin_keys=settings.admin_key,
        open_paths=status.PATHS,
        guard_metrics=settings.metrics_auth,
    )
    app.add_middleware(middleware.LastResortMiddleware)
    app.add_middleware(OriginMiddleware, settings=settings)
    app.add_middleware(middleware.RequestHeadersMiddleware, model_name=default.name)
    _install_error_handlers(app)
    return app


def find_routers() -> Iterator[APIRouter]:
    """The `router` of every module of `server/apis` that has one; the others help these."""
    for found in pkgutil.walk_packages(apis.__path__, f"{apis.__name__}."):
        module = importlib.import_module(found.name)
        if hasattr(module, "router"):
            yield module.router


def _error_schema() -> dict[str, object]:
    """The error object as JSON Schema."""
    text, text_or_null = {"type": "string"}, {"type": ["string", "null"]}
    fields = {"message": text, "type": text, "param": text_or_null, "code": text_or_null}
    return _object_schema({"error": _object_schema(fields)})


def _object_schema(properties: dict[str, object]) -> dict[str, object]:
    return {"type": "object", "required": [*properties], "properties": properties}


@contextlib.asynccontextmanager
async def _run_batches(app: FastAPI) -> AsyncIterator[None]:
    """Run batches while the process serves, and let the last write come to its end."""
    running = asyncio.create_task(BatchRunner(app, app.state.context).run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.to_thread(app.state.context.store.close)


def _install_error_handlers(app: FastAPI) -> None:
    """Handle every expected failure. `LastResortMiddleware` turns all others into an internal error."""

    async def on_error(request: Request, exc: Any) -> Response:
        return middleware.error_response(exc, request.scope)

    async def on_missing_body(request: Request, exc: Any) -> Response:
        return middleware.error_response(as_missing_body(exc), request.scope)

    async def on_http_error(request: Request, exc: Any) -> Response:
        if exc.status_code == 413:
            return middleware.error_response(BodyTooLargeError(exc.detail), request.scope)
        if isinstance(exc.__cause__, ApiError):  # FastAPI reports every body error as a parse error
            return middleware.error_response(exc.__cause__, request.scope)
        if exc.status_code in (404, 405):
            what = "no such route" if exc.status_code == 404 else "method not allowed"
            message = f"{what}: {request.method} {request.url.path}"
            return middleware.error_response(RouteError(exc.status_code, message, exc.headers or {}), request.scope)
        return middleware.error_response(RouteError(exc.status_code, str(exc.detail), exc.headers or {}), request.scope)

    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(RequestValidationError, on_missing_body)
    app.add_exception_handler(HTTPException, on_http_error)
