"""POST /v1/models/load, /unload and /alias: manage the served models while they serve. Guarded by `admin_key`.

Each answers once it has come about, at most after load_timeout_s; what was asked goes on also if nobody waits.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.errors import EngineRestartingError, InvalidRequestError, ModelFailedError, ModelLoadingError
from weft.server.http.context import ServerContext, get_context
from weft.server.models.fleet import ASK_EVERY_S, Ask, FleetState, ModelState, may_be_alias
from weft.server.schemas.models import AliasBody, ModelBody, ModelCondition
from weft.server.task.body import BodyRoute

LOOK_S = 0.03
Context = Annotated[ServerContext, Depends(get_context)]
router = APIRouter(route_class=BodyRoute)


@router.post("/v1/models/load")
async def load_model(body: ModelBody, request: Request, context: Context) -> Response:
    """Load a model, if it is not loaded; also if it has failed before."""
    name = context.find_model(request, body.model).name
    before = _state(context, name)

    def is_done(fleet: FleetState) -> bool:
        state = fleet.models[name]
        return state.state == "ready" or state.num_failures > before.num_failures

    state = await asked(Ask("load", name), is_done, context)
    if state.state == "failed":
        raise ModelFailedError(f"the model {name} cannot be loaded: {state.message}", param="model")
    if state.state != "ready":
        raise ModelLoadingError(f"the model {name} is not loaded within {context.settings.load_timeout_s:g} s")
    return _told(name, state)


@router.post("/v1/models/unload")
async def unload_model(body: ModelBody, request: Request, context: Context) -> Response:
    """Unload a model once it has answered what it has accepted. Its next request loads it again."""
    model = context.find_model(request, body.model)
    if not model.on_demand:
        raise InvalidRequestError(f"the model {model.name} is always loaded: set load: on-demand", param="model")
    num_before = _state(context, model.name).num_unloaded

    def is_done(fleet: FleetState) -> bool:
        state = fleet.models[model.name]
        return state.state in ("unloaded", "failed") or state.num_unloaded > num_before

    return _told(model.name, await asked(Ask("unload", model.name), is_done, context))


@router.post("/v1/models/alias")
async def set_alias(body: AliasBody, request: Request, context: Context) -> Response:
    """Let an alias mean another model from now on. Requests that have begun stay where they are."""
    name = context.find_model(request, body.model).name
    if not may_be_alias(body.alias, context.fleet.read()):
        message = f"alias must be no model's or adapter's own name, and there may not be more of them, got {body.alias}"
        raise InvalidRequestError(message, param="alias")

    def is_done(fleet: FleetState) -> bool:
        return fleet.aliases.get(body.alias) == name

    state = await asked(Ask("alias", name, body.alias), is_done, context)
    if not is_done(context.fleet.read()):
        raise EngineRestartingError(f"{body.alias} does not mean {name} yet; ask again")
    return _told(name, state)


async def asked(ask: Ask, is_done: Callable[[FleetState], bool], context: ServerContext) -> ModelState:
    """Ask, and wait; the model's state after that."""
    deadline = time.monotonic() + context.settings.load_timeout_s
    ask_time = 0.0
    while not is_done(context.fleet.read()) and (now := time.monotonic()) < deadline:
        if now >= ask_time:
            context.fleet.ask(ask)
            ask_time = now + ASK_EVERY_S
        await asyncio.sleep(LOOK_S)
    return _state(context, ask.model)


def _state(context: ServerContext, name: str) -> ModelState:
    return context.fleet.read().models[name]


def _told(name: str, state: ModelState) -> Response:
    condition = ModelCondition(name, state.state, state.memory_bytes)
    return Response(msgspec.json.encode(condition), media_type="application/json")
