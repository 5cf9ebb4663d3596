"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them, guarded by `admin_key`.

The engine loads the adapter before its name is served. The supervisor then serves the name in all server processes, and
no longer after an unload; requests that have begun keep their adapter to their end.
"""

import asyncio
import os
import pathlib
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from weft.engine.shared.adapters import Adapter, find_adapter
from weft.engine.shared.errors import ModelError
from weft.engine.shared.messages import AddRequest, TokensInput
from weft.engine.shared.sampling_params import SamplingParams
from weft.engine.shared.vectors import Pooling
from weft.server.api.model_admin import asked
from weft.server.errors import (
    EngineRestartingError,
    InvalidRequestError,
    ModelFailedError,
    ModelLoadingError,
    ModelNotFoundError,
    shown,
)
from weft.server.http.context import ServerContext, get_context
from weft.server.model.served_model import ServedModel
from weft.server.models.fleet import Ask, FleetState, ServedAdapter, adapter_fault
from weft.server.request.fields import ignored_fields, ignored_header
from weft.server.schemas.models import LoadAdapterBody, UnloadAdapterBody
from weft.server.task.body import BodyRoute

Context = Annotated[ServerContext, Depends(get_context)]
router = APIRouter(route_class=BodyRoute)


@router.post("/v1/load_lora_adapter")
async def load_adapter(body: LoadAdapterBody, request: Request, context: Context) -> Response:
    """Load an adapter from a folder of the server's machine, and serve it under its name."""
    ignored = ignored_fields(body, {}, strict=context.settings.strict_params)
    model, name = context.find_model(request, body.model), body.lora_name
    if model.adapter is not None:
        raise InvalidRequestError(f"model must be a model, got the adapter {body.model}", param="model")
    if not context.settings.for_model(model.name).num_lora_slots:
        message = f"the model {model.name} takes no adapters: max_loras must be at least 1, but is 0"
        raise InvalidRequestError(message, param="model")
    folder = pathlib.Path(os.path.expanduser(body.lora_path)).absolute()  # which leaves an unknown user's ~ alone
    try:
        served = ServedAdapter(model.name, await asyncio.to_thread(find_adapter, name, folder))
    except ModelError as error:
        raise InvalidRequestError(f"lora_path: {error}", param="lora_path") from None
    fleet = context.fleet.read()
    fault = adapter_fault(served, fleet, replaces=body.load_inplace)
    if fleet.adapters.get(name) == served and not body.load_inplace:
        fault = f"lora_name {name} is already this adapter"
    if fault is not None:
        raise InvalidRequestError(fault, param="lora_name")
    await _load(model, served.adapter, context.settings.load_timeout_s)

    def is_done(fleet: FleetState) -> bool:
        return fleet.adapters.get(name) == served or bool(adapter_fault(served, fleet, replaces=body.load_inplace))

    ask = Ask("add adapter", model.name, adapter=served.adapter, replaces=body.load_inplace)
    await asked(ask, is_done, context)
    if context.fleet.read().adapters.get(name) != served:
        raise EngineRestartingError(f"the adapter {name} is not served yet, or another one under its name; ask again")
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.", headers=ignored_header(ignored))


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(body: UnloadAdapterBody, context: Context) -> Response:
    """Serve an adapter no longer."""
    ignored = ignored_fields(body, {}, strict=context.settings.strict_params)
    name = body.lora_name
    served = context.fleet.read().adapters.get(name)
    if served is None:
        raise ModelNotFoundError(f"the LoRA adapter {shown(name)} cannot be found", param="lora_name")

    def is_done(fleet: FleetState) -> bool:
        return fleet.adapters.get(name) != served

    await asked(Ask("drop adapter", served.model, adapter=served.adapter), is_done, context)
    if not is_done(context.fleet.read()):
        raise EngineRestartingError(f"the adapter {name} is still served; ask again")
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.", headers=ignored_header(ignored))


async def _load(model: ServedModel, adapter: Adapter, timeout_s: float) -> None:
    """Have the engine load an adapter: it accepts a request once it has what the request needs."""
    await model.engine_client.load()
    try:
        async with asyncio.timeout(timeout_s):
            is_vector = model.engine_info.vectors is not None
            add = AddRequest(
                TokensInput([0]),
                SamplingParams(max_tokens=0 if is_vector else 1),
                adapter=adapter,
                pooling=Pooling() if is_vector else None,
            )
            (await model.engine_client.generate(add)).close()
    except ModelFailedError as error:
        raise InvalidRequestError(f"lora_path: {error.message}", param="lora_path") from None
    except TimeoutError:
        message = f"the adapter {adapter.name} is not loaded within {timeout_s:g} s: all slots may be in use"
        raise ModelLoadingError(message) from None
