"""The query of a list: `limit`, `order`, `after`; and the list as JSON.

Wire types of GET /v1/models: one model and the list of all models.

GET /v1/models and /v1/models/{id}: list and describe the served models.

They need no network and answer while the engine loads, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.wire.options import MAX_FOLDER_CHARS
from weft.server.apis.anthropic.schema import AnthropicModel, AnthropicModels
from weft.server.errors import InvalidRequestError, shown
from weft.server.http.context import ServerContext, get_context
from weft.server.http.middleware import asks_in_anthropics_way
from weft.server.model_entry import ModelName
from weft.server.models.served_model import ServedModel
from weft.server.store.transaction import Order, Row
from weft.server.task.schema import WireModel
from weft.server.task.validation import check_range


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list is wanted: up to `limit` objects behind `after`."""

    limit: int
    order: Order
    after: str | None


def read_page(request: Request, *, max_limit: int, default_limit: int, order: Order = "desc") -> Page:
    """Read the query.

    Raises:
        InvalidRequestError: A value is out of range.
    """
    query = request.query_params
    given = query.get("limit", str(default_limit))
    if not (given.isascii() and given.lstrip("-").isdecimal() and len(given) < 10):
        raise InvalidRequestError(f"limit must be a whole number, got {shown(given)}", param="limit")
    chosen = query.get("order", order)
    if chosen not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc, got {shown(chosen)}", param="order")
    limit = check_range("limit", int(given), 1, max_limit)
    return Page(limit, "asc" if chosen == "asc" else "desc", query.get("after"))


def list_answer(
    rows: Sequence[Row] | None, page: Page, show: Callable[[Row], bytes] = lambda row: row.data
) -> Response:
    """The answer to a list for which `page.limit + 1` rows were asked.

    Raises:
        InvalidRequestError: There is no object `after`.
    """
    if rows is None:
        raise InvalidRequestError(
            f"after must be the id of an object in the list, got {shown(page.after)}", param="after"
        )
    shown_rows = rows[: page.limit]
    return json_answer(
        {
            "object": "list",
            "data": [msgspec.Raw(show(row)) for row in shown_rows],
            "first_id": shown_rows[0].id if shown_rows else None,
            "last_id": shown_rows[-1].id if shown_rows else None,
            "has_more": len(rows) > page.limit,
        }
    )


def json_answer(value: object) -> Response:
    """A value as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


class SamplingDefaults(msgspec.Struct, omit_defaults=True):
    """The checkpoint's own defaults for fields that a request leaves out. An extension."""

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


class ModelList(msgspec.Struct):
    """All served models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


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
