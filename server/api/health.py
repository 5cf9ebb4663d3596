"""GET /health, /ready and /version: report the server's state and its version.

/health and /ready are for probes and load balancers and need no API key. /version needs one. Healthy means that the
engine is alive. The engine's status page in shared memory says so; that a server process answers proves nothing about
the engine. Ready means healthy and not draining.
"""

import time
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from weft.server.errors import EngineRestartingError, ShuttingDownError
from weft.server.http.context import VERSION, ServerContext, get_context

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(context: Annotated[ServerContext, Depends(get_context)]) -> Response:
    """200 while the engine shows signs of life, else 503."""
    await _check_engines(context)
    return JSONResponse({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(context: Annotated[ServerContext, Depends(get_context)]) -> Response:
    """200 while new requests are accepted, else 503."""
    if context.lifecycle.draining:
        raise ShuttingDownError("the server is shutting down")
    await _check_engines(context)
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def show_version() -> Response:
    """The version of this server."""
    return JSONResponse({"version": VERSION})


async def _check_engines(context: ServerContext) -> None:
    await context.meet_engines()
    for client in context.engine_clients:
        status = client.status()
        if missing := status.num_missing_machines:
            raise EngineRestartingError(f"the engine waits for {missing} of its machines to join")
        if client.info is None:
            raise EngineRestartingError("no engine is connected: it is loading or restarting")
        if not status.is_alive:
            silence_s = time.monotonic() - status.progress_time
            what = f"has given no sign of life for {silence_s:.0f} s" if status.is_ready else "is loading"
            raise EngineRestartingError(f"the engine {what}")
