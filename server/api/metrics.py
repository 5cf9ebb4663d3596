"""GET /metrics: the metrics in Prometheus' text format."""

from typing import Annotated

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from weft.server.http.context import ServerContext, get_context

router = APIRouter()


@router.get("/metrics")
async def show_metrics(context: Annotated[ServerContext, Depends(get_context)]) -> Response:
    """The metrics; every server process gives the same answer."""
    return Response(context.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})
