"""Routes that manage models and LoRA adapters while they serve, guarded by `admin_key`.

POST /v1/models/load, /unload and /alias are for models. POST /v1/load_lora_adapter and /v1/unload_lora_adapter are for
adapters, as vLLM has them. Each answers once it has come about, at most after load_timeout_s; what was asked goes on
also if nobody waits.

The engine loads an adapter before its name is served. The supervisor then serves the name in all server processes, and
no longer after an unload; requests that have begun keep their adapter to their end.
"""

import asyncio
import os
import pathlib
import time
from collections.abc import Callable
from functools import partial

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.options import MAX_FOLDER_CHARS, Adapter, find_adapter
from weft.engine.wire.params import Pooling, SamplingParams
from weft.engine.wire.waiting_threads import WaitingThreads
from weft.server import errors
from weft.server.apis.openai.pages import json_answer
from weft.server.http.context import Context, ServerContext
from weft.server.model_entry import ModelName
from weft.server.models import fleet as fleets
from weft.server.models.served_model import ServedModel
from weft.server.task.body import BodyRoute
from weft.server.task.schema import WireModel
from weft.server.task.validation import ignored_fields, ignored_header


class ModelBody(WireModel):
    """The body of POST /v1/models/load and /unload."""

    model: ModelName


class AliasBody(ModelBody):
    """The body of POST /v1/models/alias."""

    alias: ModelName


class LoadAdapterBody(WireModel):
    """The body of POST /v1/load_lora_adapter, as vLLM has it.

    Attributes:
        model: Which of several models it belongs to; an extension. None: the first one.
    """

    lora_name: ModelName
    lora_path: str = Field(min_length=1, max_length=MAX_FOLDER_CHARS)
    load_inplace: bool = False
    model: ModelName | None = None


class UnloadAdapterBody(WireModel):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: ModelName


class ModelCondition(msgspec.Struct):
    """What has become of a model."""

    model: str
    state: str
    memory_bytes: int | None


LOOK_S = 0.03
"""Seconds between two looks at the states of the models."""
_FOLDERS = WaitingThreads("adapter folders", 4)
"""Where folders of adapters are read: a disk that hangs keeps these from nobody but other admins."""
router = APIRouter(route_class=BodyRoute)


@router.post("/v1/models/load")
async def load_model(body: ModelBody, request: Request, context: Context) -> Response:
    """Load a model, if it is not loaded; also if it has failed before."""
    name = context.find_model(request, body.model).name
    before = _state(context, name)

    def is_done(fleet: fleets.FleetState) -> bool:
        state = fleet.models[name]
        return state.state == "ready" or state.num_failures > before.num_failures

    state = await asked(fleets.Ask("load", name), is_done, context)
    if state.state == "failed":
        raise errors.ModelFailedError(f"the model {name} cannot be loaded: {state.message}", param="model")
    if state.state != "ready":
        raise errors.ModelLoadingError(f"the model {name} is not loaded within {context.settings.load_timeout_s:g} s")
    return _told(name, state)


@router.post("/v1/models/unload")
async def unload_model(body: ModelBody, request: Request, context: Context) -> Response:
    """Unload a model once it has answered what it has accepted. Its next request loads it again."""
    model = context.find_model(request, body.model)
    if not model.on_demand:
        raise errors.InvalidRequestError(f"the model {model.name} is always loaded: set load: on-demand", param="model")
    num_before = _state(context, model.name).num_unloaded

    def is_done(fleet: fleets.FleetState) -> bool:
        state = fleet.models[model.name]
        return state.state in ("unloaded", "failed") or state.num_unloaded > num_before

    return _told(model.name, await asked(fleets.Ask("unload", model.name), is_done, context))


@router.post("/v1/models/alias")
async def set_alias(body: AliasBody, request: Request, context: Context) -> Response:
    """Let an alias mean another model from now on. Requests that have begun stay where they are."""
    name = context.find_model(request, body.model).name
    if not fleets.may_be_alias(body.alias, context.fleet.read()):
        message = f"alias must be no model's or adapter's own name, and there may not be more of them, got {body.alias}"
        raise errors.InvalidRequestError(message, param="alias")

    def is_done(fleet: fleets.FleetState) -> bool:
        return fleet.aliases.get(body.alias) == name

    state = await asked(fleets.Ask("alias", name, body.alias), is_done, context)
    if not is_done(context.fleet.read()):
        raise errors.EngineRestartingError(f"{body.alias} does not mean {name} yet; ask again")
    return _told(name, state)


async def asked(
    ask: fleets.Ask, is_done: Callable[[fleets.FleetState], bool], context: ServerContext, deadline: float | None = None
) -> fleets.ModelState:
    """Ask, and wait, up to load_timeout_s unless there is a deadline; the model's state after that."""
    if deadline is None:
        deadline = time.monotonic() + context.settings.load_timeout_s
    ask_time = 0.0
    while not is_done(context.fleet.read()) and (now := time.monotonic()) < deadline:
        is_obeyed = ask.kind == "load" and _state(context, ask.model).state == "loading"
        if now >= ask_time and not is_obeyed:  # asked once more, a load that fails would begin again
            context.fleet.ask(ask)
            ask_time = now + fleets.ASK_EVERY_S
        await asyncio.sleep(LOOK_S)
    return _state(context, ask.model)


def _state(context: ServerContext, name: str) -> fleets.ModelState:
    return context.fleet.read().models[name]


def _told(name: str, state: fleets.ModelState) -> Response:
    condition = ModelCondition(name, state.state, state.memory_bytes)
    return json_answer(condition)


@router.post("/v1/load_lora_adapter")
async def load_adapter(body: LoadAdapterBody, request: Request, context: Context) -> Response:
    """Load an adapter from a folder of the server's machine, and serve it under its name."""
    ignored = ignored_fields(body, {}, strict=context.settings.strict_params)
    model, name = context.find_model(request, body.model), body.lora_name
    if model.adapter is not None:
        raise errors.InvalidRequestError(f"model must be a model, got the adapter {body.model}", param="model")
    if not context.settings.for_model(model.name).num_lora_slots:
        message = f"the model {model.name} takes no adapters: max_loras must be at least 1, but is 0"
        raise errors.InvalidRequestError(message, param="model")
    deadline = time.monotonic() + context.settings.load_timeout_s
    served = fleets.ServedAdapter(model.name, await _found(name, body.lora_path, context.settings.load_timeout_s))
    fleet = context.fleet.read()
    fault = fleets.adapter_fault(served, fleet, replaces=body.load_inplace)
    if fleet.adapters.get(name) == served and not body.load_inplace:
        fault = f"lora_name {name} is already this adapter"
    if fault is not None:
        raise errors.InvalidRequestError(fault, param="lora_name")
    await _load_in_engine(model, served.adapter, deadline, context.settings.load_timeout_s)

    def is_done(fleet: fleets.FleetState) -> bool:
        return fleet.adapters.get(name) == served or bool(
            fleets.adapter_fault(served, fleet, replaces=body.load_inplace)
        )

    ask = fleets.Ask("add adapter", model.name, adapter=served.adapter, replaces=body.load_inplace)
    await asked(ask, is_done, context, deadline)
    if context.fleet.read().adapters.get(name) != served:
        raise errors.EngineRestartingError(
            f"the adapter {name} is not served yet, or another one under its name; ask again"
        )
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.", headers=ignored_header(ignored))


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(body: UnloadAdapterBody, context: Context) -> Response:
    """Serve an adapter no longer."""
    ignored = ignored_fields(body, {}, strict=context.settings.strict_params)
    name = body.lora_name
    served = context.fleet.read().adapters.get(name)
    if served is None:
        raise errors.ModelNotFoundError(f"the LoRA adapter {errors.shown(name)} cannot be found", param="lora_name")

    def is_done(fleet: fleets.FleetState) -> bool:
        return fleet.adapters.get(name) != served

    await asked(fleets.Ask("drop adapter", served.model, adapter=served.adapter), is_done, context)
    if not is_done(context.fleet.read()):
        raise errors.EngineRestartingError(f"the adapter {name} is still served; ask again")
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.", headers=ignored_header(ignored))


async def _found(name: str, path: str, timeout_s: float) -> Adapter:
    """The adapter in a folder, whose disk may hang."""
    folder = pathlib.Path(os.path.expanduser(path)).absolute()  # which leaves an unknown user's ~ alone
    finding = _FOLDERS.submit(partial(find_adapter, name, folder, 0.9 * timeout_s))  # files that are long say so
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(finding)
    except ModelError as error:
        raise errors.InvalidRequestError(f"lora_path: {error}", param="lora_path") from None
    except TimeoutError:
        raise errors.ModelLoadingError(
            f"the files in {folder} are not read within {timeout_s:g} s", param="lora_path"
        ) from None


async def _load_in_engine(model: ServedModel, adapter: Adapter, deadline: float, timeout_s: float) -> None:
    """Have the engine load an adapter: it accepts a request once it has what the request needs."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            await model.engine_client.load()
            is_vector = model.engine_info.vectors is not None
            add = AddRequest(
                TokensInput([0]),
                SamplingParams(max_tokens=0 if is_vector else 1),
                adapter=adapter,
                pooling=Pooling() if is_vector else None,
            )
            (await model.engine_client.generate(add)).close()
    except errors.ModelFailedError as error:
        raise errors.InvalidRequestError(f"lora_path: {error.message}", param="lora_path") from None
    except TimeoutError:
        message = f"the adapter {adapter.name} is not loaded within {timeout_s:g} s: all slots may be in use"
        raise errors.ModelLoadingError(message) from None
