"""GET /v1/models and /v1/models/{id}. Answers without a network, and while the engine loads."""

from dataclasses import asdict
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from weft.server.http.context import ServerContext, get_context
from weft.server.schemas.models import Model, ModelList, SamplingDefaults

router = APIRouter()


@router.get("/v1/models")
async def list_models(context: Annotated[ServerContext, Depends(get_context)]) -> Response:
    """The served model under each of its names."""
    return _json(ModelList([_model(name, context) for name in context.model_names]))


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, context: Annotated[ServerContext, Depends(get_context)]) -> Response:
    """One model; an id with a slash may come percent-encoded or raw."""
    return _json(_model(context.check_model(model_id), context))


def _model(name: str, context: ServerContext) -> Model:
    info = context.engine_client.info
    return Model(
        name,
        context.created,
        context.model_names[0],
        info.max_model_len if info else None,
        SamplingDefaults(**asdict(context.defaults)),
    )


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
