"""Builds the FastAPI application: routes, error handlers and middleware. Uses no globals and starts nothing.

Routes use `app.state.context`; the process drains `app.state.lifecycle`.
"""

import pathlib
import time
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weft.server.api import chat_completions, chat_page, completions, docs, health, metrics, models, stats, tokenize
from weft.server.errors import ERROR_SCHEMA, ApiError, BodyTooLargeError, RouteError, as_api_error, error_response
from weft.server.formats.detection import choose_formats
from weft.server.generate.engine_client import (
    EngineClient,
    EngineDiedError,
    EngineLeftError,
    EngineUnavailableError,
    RequestRejectedError,
)
from weft.server.http.auth import AuthMiddleware
from weft.server.http.context import VERSION, ServerContext, TextTokenizer
from weft.server.http.lifecycle import Lifecycle
from weft.server.http.metrics import Metrics
from weft.server.http.middleware import (
    BodyLimitMiddleware,
    DrainMiddleware,
    LastResortMiddleware,
    RequestHeadersMiddleware,
)
from weft.server.http.origins import OriginMiddleware
from weft.server.http.workers import Workers
from weft.server.request.generation_defaults import GenerationDefaults, read_generation_defaults
from weft.server.request.validation import as_missing_body
from weft.server.settings import Settings


def create_app(engine_client: EngineClient, tokenizer: TextTokenizer, settings: Settings) -> FastAPI:
    """Build the application.

    Args:
        engine_client: Need not be connected yet; until then requests get 503.
        settings: With at least one `served_model_name`; `model` is the checkpoint folder, where the model's own
            sampling defaults lie, or None if there are none.
    """
    model_names = settings.served_model_name
    if not model_names:
        raise ValueError("settings.served_model_name must hold at least one name, got none")
    defaults = read_generation_defaults(pathlib.Path(settings.model)) if settings.model else GenerationDefaults()
    # "default" also keeps FastAPI from describing a 422, which this server never sends.
    failure = {"description": "An error", "content": {"application/json": {"schema": ERROR_SCHEMA}}}
    app = FastAPI(title="Weft", version=VERSION, docs_url=None, redoc_url=None, responses={"default": failure})
    app.state.lifecycle = Lifecycle()
    app.state.context = ServerContext(
        engine_client=engine_client,
        tokenizer=tokenizer,
        settings=settings,
        lifecycle=app.state.lifecycle,
        metrics=Metrics(engine_client, model_names[0]),
        defaults=defaults,
        workers=Workers(),
        formats=choose_formats(tokenizer.template_source(has_tools=True), settings.tool_format, tokenizer.added_id),
        model_names=model_names,
        created=int(time.time()),
    )
    for module in (chat_completions, completions, models, tokenize, health, metrics, stats, docs, chat_page):
        app.include_router(module.router)
    # The last one is the outermost.
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(DrainMiddleware, lifecycle=app.state.lifecycle)
    app.add_middleware(
        AuthMiddleware, keys=settings.api_key, open_paths=chat_page.PATHS, guard_metrics=settings.metrics_auth
    )
    app.add_middleware(LastResortMiddleware)
    app.add_middleware(OriginMiddleware, settings=settings)
    app.add_middleware(RequestHeadersMiddleware, model_name=model_names[0])
    _install_error_handlers(app)
    return app


def _install_error_handlers(app: FastAPI) -> None:
    """Handle every expected failure; `LastResortMiddleware` makes the others an internal error."""

    async def on_error(request: Request, exc: Exception) -> Response:
        return error_response(as_api_error(exc))

    async def on_missing_body(request: Request, exc: Any) -> Response:
        return error_response(as_missing_body(exc))

    async def on_http_error(request: Request, exc: Any) -> Response:
        if exc.status_code == 413:
            return error_response(BodyTooLargeError(exc.detail))
        if isinstance(exc.__cause__, ApiError):  # FastAPI reports every fault in a body as a parse error
            return error_response(exc.__cause__)
        if exc.status_code in (404, 405):
            what = "no such route" if exc.status_code == 404 else "method not allowed"
            message = f"{what}: {request.method} {request.url.path}"
            return error_response(RouteError(exc.status_code, message, exc.headers or {}))
        return error_response(RouteError(exc.status_code, str(exc.detail), exc.headers or {}))

    for kind in (ApiError, EngineUnavailableError, EngineDiedError, EngineLeftError, RequestRejectedError):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(RequestValidationError, on_missing_body)
    app.add_exception_handler(HTTPException, on_http_error)
