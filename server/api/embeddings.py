"""POST /v1/embeddings, /pooling and /v1/classify: vectors of texts, one for each input."""

from collections.abc import Callable
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.shared.vectors import PooledOutput, Pooling, VectorInfo
from weft.server.errors import InvalidRequestError, UnsupportedValueError
from weft.server.generate.vectors import VectorCall, Vectors
from weft.server.http.context import ServerContext, get_context
from weft.server.model.served_model import ServedModel
from weft.server.render.vectors import embedding, hidden, values_of
from weft.server.request.fields import ignored_header
from weft.server.request.validation import check_range
from weft.server.request.vector_inputs import InputEncoder, as_list, prompted, require_task
from weft.server.schemas.vectors import Class, ClassifyBody, Embedding, EmbeddingBody, Hidden, PoolingBody, VectorList
from weft.server.task.body import BodyRoute

router = APIRouter(route_class=BodyRoute)
Context = Annotated[ServerContext, Depends(get_context)]


@router.post("/v1/embeddings")
async def create_embeddings(body: EmbeddingBody, request: Request, context: Context) -> Response:
    """The vector of each input."""
    model = await context.check_model(request, body.model)
    require_task(model, "embed")
    inputs = prompted(as_list(body.input), model, body.prompt_name, body.input_type)
    pooling = Pooling(dimensions=check_dimensions(body.dimensions, model), is_finished=body.normalize)
    call = VectorCall(body, request, context, model, InputEncoder(model, body, "input"))
    vectors = await call.vectors(inputs, pooling, "embd")

    def entries() -> list[Embedding]:
        return [embedding(index, output, body.encoding_format) for index, output in enumerate(vectors.outputs)]

    return await answer(context, vectors, lambda: _listed(vectors, entries()))


@router.post("/pooling")
async def pool(body: PoolingBody, request: Request, context: Context) -> Response:
    """The hidden states of all tokens of each input, or its vector."""
    model = await context.check_model(request, body.model)
    require_task(model, "embed", "classify")
    own, task = model.engine_info.task, body.task or "token_embed"
    if task not in ("token_embed", own):
        raise UnsupportedValueError(f"task must be token_embed or {own} for this model, got {task}", param="task")
    is_per_token = task == "token_embed"
    if is_per_token and (body.normalize or body.use_activation):
        param = "normalize" if body.normalize else "use_activation"
        raise InvalidRequestError(f"{param} cannot be used with task token_embed", param=param)
    is_finished = body.normalize if own == "embed" else body.use_activation
    pooling = Pooling(is_per_token, check_dimensions(body.dimensions, model), is_finished)
    call = VectorCall(body, request, context, model, InputEncoder(model, body, "input"))
    vectors = await call.vectors(as_list(body.input), pooling, "pool")

    def entries() -> list[Hidden]:
        outputs = enumerate(vectors.outputs)
        return [hidden(index, output, body.encoding_format, is_per_token=is_per_token) for index, output in outputs]

    return await answer(context, vectors, lambda: _listed(vectors, entries()))


@router.post("/v1/classify")
@router.post("/classify")
async def classify(body: ClassifyBody, request: Request, context: Context) -> Response:
    """The labels' probabilities for each input."""
    model = await context.check_model(request, body.model)
    require_task(model, "classify")
    labels = vector_info(model).labels
    call = VectorCall(body, request, context, model, InputEncoder(model, body, "input"))
    vectors = await call.vectors(as_list(body.input), Pooling(is_finished=body.use_activation), "classify")

    def entry(index: int, output: PooledOutput) -> Class:
        probs = values_of(output)
        return Class(index, labels[probs.index(max(probs))], probs, len(probs))

    entries = [entry(index, output) for index, output in enumerate(vectors.outputs)]
    return await answer(context, vectors, lambda: _listed(vectors, entries))


def vector_info(model: ServedModel) -> VectorInfo:
    """What the vectors of a model are that makes some."""
    info = model.engine_info.vectors
    assert info is not None, "its task was checked"
    return info


async def answer(context: ServerContext, vectors: Vectors, build: Callable[[], msgspec.Struct]) -> Response:
    """The response with the answer that `build` makes."""
    size = sum(len(output.values) for output in vectors.outputs)
    content = await context.workers.run(size, lambda: msgspec.json.encode(build()))
    return Response(content, headers=ignored_header(vectors.ignored), media_type="application/json")


def _listed(vectors: Vectors, data: list[Embedding] | list[Hidden] | list[Class]) -> VectorList:
    return VectorList(vectors.id, vectors.created, vectors.name, data, vectors.usage)


def check_dimensions(dimensions: int | None, model: ServedModel) -> int | None:
    """Check the number of values that a body asks for.

    Raises:
        ApiError: The model has no such vectors.
    """
    info = vector_info(model)
    if dimensions is None or dimensions == info.size:
        return dimensions
    if not info.is_matryoshka:
        message = f"dimensions must be {info.size}, for this model has no shorter vectors, got {dimensions}"
        raise UnsupportedValueError(message, param="dimensions")
    if info.dimensions and dimensions not in info.dimensions:
        allowed = ", ".join(map(str, info.dimensions))
        raise InvalidRequestError(f"dimensions must be one of {allowed}, got {dimensions}", param="dimensions")
    return check_range("dimensions", dimensions, 1, info.size)
