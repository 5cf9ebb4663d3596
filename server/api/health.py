"""GET /health and /ready, for probes and load balancers, open to everybody; and /version, which asks for a key.

Healthy means that the engine makes progress, as its status page in shared memory says; a server process that merely
answers proves nothing. Ready means healthy, and not about to stop.
"""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from server.context import VERSION, ServerContext, get_context
from server.errors import EngineRestartingError, ShuttingDownError

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(context: Annotated[ServerContext, Depends(get_context)]) -> Response:
    """200 while the engine makes progress or has nothing to do, else 503."""
    _check_engine(context)
    return JSONResponse({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(context: Annotated[ServerContext, Depends(get_context)]) -> Response:
    """200 while new requests are served, else 503."""
    if context.lifecycle.draining:
        raise ShuttingDownError("the server is shutting down")
    _check_engine(context)
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def show_version() -> Response:
    """The version of this server."""
    return JSONResponse({"version": VERSION})


def _check_engine(context: ServerContext) -> None:
    if context.engine_client.info is None:
        raise EngineRestartingError("no engine is connected: it is loading or restarting")
    status, stall_s = context.engine_client.status(), context.settings.stall_timeout_s
    if not status.is_alive(stall_s):
        what = f"has not made progress for {stall_s:g} s" if status.is_ready else "is loading"
        raise EngineRestartingError(f"the engine {what}")
