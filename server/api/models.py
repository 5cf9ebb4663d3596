"""GET /v1/models and /v1/models/{id}: list and describe the served models.

They need no network and answer while the engine loads, too.
"""

from dataclasses import asdict
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.http.context import ServerContext, get_context
from weft.server.model.served_model import ServedModel
from weft.server.schemas.models import ModelCard, ModelList, SamplingDefaults

router = APIRouter()


@router.get("/v1/models")
async def list_models(context: Annotated[ServerContext, Depends(get_context)]) -> Response:
    """Every model under each of its names."""
    await context.meet_engines()
    return _json(ModelList([_described(name, model, context) for name, model in context.models.items()]))


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(
    model_id: str, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """One model. A slash in the id may be percent-encoded or raw."""
    return _json(_described(model_id, await context.check_model(request, model_id), context))


def _described(name: str, model: ServedModel, context: ServerContext) -> ModelCard:
    info = model.engine_client.info
    defaults = SamplingDefaults(**asdict(model.defaults))
    return ModelCard(name, context.created, model.name, info.max_model_len if info else None, defaults)


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
