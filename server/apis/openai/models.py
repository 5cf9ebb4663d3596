"""GET /v1/models and /v1/models/{id}, with their wire types, in OpenAI's and in Anthropic's shape.

They need no network, and answer while the engine loads, too.
"""

from datetime import UTC, datetime
from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from weft.server.apis.openai.agent_models import AgentModel, agent_models
from weft.server.apis.openai.pages import json_answer
from weft.server.http.context import Context, ServerContext
from weft.server.http.middleware import asks_in_anthropics_way
from weft.server.models.served_model import ServedModel


class SamplingDefaults(msgspec.Struct, omit_defaults=True):
    """What holds for fields that a request leaves out. An extension."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ModelCard(msgspec.Struct):
    """One served model. The fields from `root` on are extensions. `max_model_len` is null while the engine loads.

    Attributes:
        root: The model's own name; of an adapter its folder.
        parent: Of an adapter, the own name of its model.
        state: unloaded, loading, ready, unloading or failed.
        memory_bytes: What it takes while it is loaded, if that was planned.
        last_used: When a model that is loaded on demand last worked, in seconds since 1970.
        input_modalities: `audio` of a model that hears, else `text`, and `image` if it sees; null if it was never
            loaded and its files do not say that it hears.
    """

    id: str
    created: int
    root: str
    max_model_len: int | None
    default_sampling_params: SamplingDefaults
    object: Literal["model"] = "model"
    owned_by: str = "weft"
    state: str = "ready"
    memory_bytes: int | None = None
    last_used: float | None = None
    shutdown_date: None = None
    parent: str | None = None
    input_modalities: tuple[str, ...] | None = None


class ModelList(msgspec.Struct):
    """All served models. `models` is what Codex reads of the list."""

    data: list[ModelCard]
    models: list[AgentModel]
    object: Literal["list"] = "list"


class AnthropicModel(msgspec.Struct, tag="model"):
    """One served model."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    lifecycle: Literal["active"] = "active"


class AnthropicModels(msgspec.Struct):
    """All served models, on one page."""

    data: list[AnthropicModel]
    first_id: str
    last_id: str
    has_more: bool = False


router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request, context: Context) -> Response:
    """Every model under each of its names."""
    await context.meet_engines()
    if asks_in_anthropics_way(request.scope):
        models = [_in_anthropics_way(name, model, context) for name, model in context.models.items()]
        return json_answer(AnthropicModels(models, models[0].id, models[-1].id))
    cards = [_described(name, model, context) for name, model in context.models.items()]
    return json_answer(ModelList(cards, agent_models(context.models)))


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, request: Request, context: Context) -> Response:
    """One model. A slash in the id may be percent-encoded or raw."""
    model = context.find_model(request, model_id)
    await model.engine_client.meet()
    describe = _in_anthropics_way if asks_in_anthropics_way(request.scope) else _described
    return json_answer(describe(model_id, model, context))


def _described(name: str, model: ServedModel, context: ServerContext) -> ModelCard:
    info = model.engine_client.info
    defaults = msgspec.convert(model.defaults.values(), SamplingDefaults)
    card = ModelCard(name, context.created, model.name, info.max_model_len if info else None, defaults)
    card.input_modalities = model.input_modalities
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
