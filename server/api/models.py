"""GET /v1/models and /v1/models/{id}: list and describe the served models.

They need no network and answer while the engine loads, too.
"""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.http.context import ServerContext, get_context
from weft.server.http.error_shapes import asks_in_anthropics_way
from weft.server.model.served_model import ServedModel
from weft.server.schemas.messages import AnthropicModel, AnthropicModels
from weft.server.schemas.models import ModelCard, ModelList, SamplingDefaults

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request, context: Annotated[ServerContext, Depends(get_context)]) -> Response:
    """Every model under each of its names."""
    await context.meet_engines()
    if asks_in_anthropics_way(request.scope):
        models = [_in_anthropics_way(name, model, context) for name, model in context.models.items()]
        return _json(AnthropicModels(models, models[0].id, models[-1].id))
    return _json(ModelList([_described(name, model, context) for name, model in context.models.items()]))


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(
    model_id: str, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """One model. A slash in the id may be percent-encoded or raw."""
    model = context.find_model(request, model_id)
    await model.engine_client.meet()
    describe = _in_anthropics_way if asks_in_anthropics_way(request.scope) else _described
    return _json(describe(model_id, model, context))


def _described(name: str, model: ServedModel, context: ServerContext) -> ModelCard:
    info = model.engine_client.info
    defaults = SamplingDefaults(**asdict(model.defaults))
    card = ModelCard(name, context.created, model.name, info.max_model_len if info else None, defaults)
    state = context.fleet.read().models.get(model.name)
    if state is not None:
        card.state, card.memory_bytes, card.last_used = state.state, state.memory_bytes, state.last_used
    if model.adapter is not None:
        card.root, card.parent, card.memory_bytes = model.adapter.folder, model.name, None
    return card


def _in_anthropics_way(name: str, model: ServedModel, context: ServerContext) -> AnthropicModel:
    """For clients that send Anthropic's header, who parse nothing else."""
    info = model.engine_client.info
    created = datetime.fromtimestamp(context.created, UTC).isoformat().replace("+00:00", "Z")
    length = info.max_model_len if info else None
    return AnthropicModel(name, name, created, length, length)


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
