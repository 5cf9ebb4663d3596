"""GET /stats: the model's abilities and the state of the engine, as JSON, for the chat page."""

from functools import lru_cache
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from weft.engine.wire.status_page import SHOWN, Status
from weft.server.formats.reasoning import reasoning_switch
from weft.server.http.context import VERSION, ServerContext, get_context
from weft.server.schemas.stats import Stats, ThinkingSwitch

router = APIRouter()

_switch = lru_cache(maxsize=1)(reasoning_switch)


@router.get("/stats")
async def show_stats(context: Annotated[ServerContext, Depends(get_context)]) -> Response:
    """The model's abilities and one reading of the engine's status. Counters start with the engine."""
    served = context.default_model
    await served.engine_client.meet()
    info, status = served.engine_client.info, served.engine_client.status()
    switch = _switch(served.formats.template)
    stats = Stats(
        model=served.name,
        version=VERSION,
        is_ready=info is not None and status.is_alive,
        max_model_len=info.max_model_len if info else None,
        has_tools=served.formats.tools is not None,
        thinking=ThinkingSwitch(switch.on, switch.off) if switch else None,
        engine=engine_stats(status),
    )
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(stats), media_type="application/json", headers=headers)


def engine_stats(status: Status) -> dict[str, float]:
    """The part of a reading that is public."""
    return {name: getattr(status, name) for name, shown in SHOWN.items() if shown.in_stats}
