"""POST /api/embed and /api/embeddings: vectors in the shape of Ollama.

Texts that are too long are cut unless `truncate` is false. /api/embed gives vectors of length 1, as Ollama does, and
the older route those that the model makes.
"""

import time
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.shared.vectors import Pooling
from weft.server.api.embeddings import answer, check_dimensions
from weft.server.generate.vectors import VectorCall, Vectors
from weft.server.http.context import ServerContext, get_context
from weft.server.model.served_model import ServedModel
from weft.server.render.vectors import values_of
from weft.server.request.validation import renaming
from weft.server.request.vector_inputs import InputEncoder, as_list, prompted, require_task
from weft.server.schemas.ollama import OllamaEmbedBody, OllamaEmbedded, OllamaEmbedding, OllamaEmbeddingsBody
from weft.server.schemas.vectors import VectorBody
from weft.server.task.body import BodyRoute

_RENAMED = {r"^truncate_prompt_tokens": "truncate"}

router = APIRouter(route_class=BodyRoute)
Context = Annotated[ServerContext, Depends(get_context)]


@router.post("/api/embed")
async def embed(body: OllamaEmbedBody, request: Request, context: Context) -> Response:
    """The vector of each text."""
    start = time.perf_counter_ns()
    model = await context.check_model(request, body.model)
    require_task(model, "embed")
    pooling = Pooling(dimensions=check_dimensions(body.dimensions, model), is_finished=True)
    texts, may_cut = body.input or [], body.truncate is not False
    vectors = await _vectors(body, texts, pooling, request, context, model, may_cut=may_cut)

    def build() -> OllamaEmbedded:
        values = [values_of(output) for output in vectors.outputs]
        lasted = time.perf_counter_ns() - start
        return OllamaEmbedded(vectors.name, values, lasted, 0, vectors.usage.prompt_tokens)

    return await answer(context, vectors, build)


@router.post("/api/embeddings")
async def embeddings(body: OllamaEmbeddingsBody, request: Request, context: Context) -> Response:
    """The vector of one text."""
    model = await context.check_model(request, body.model)
    require_task(model, "embed")
    vectors = await _vectors(body, body.prompt or [], Pooling(), request, context, model, may_cut=True)
    values = [value for output in vectors.outputs for value in values_of(output)]
    return await answer(context, vectors, lambda: OllamaEmbedding(values))


async def _vectors(
    sent: OllamaEmbedBody | OllamaEmbeddingsBody,
    texts: str | list[str],
    pooling: Pooling,
    request: Request,
    context: ServerContext,
    model: ServedModel,
    *,
    may_cut: bool,
) -> Vectors:
    """The vectors of texts, of which there may be none."""
    body = VectorBody(model=sent.model, truncate_prompt_tokens=-1 if may_cut else None)
    with renaming(_RENAMED):
        inputs = prompted(as_list(texts), model, None, None) if texts else []
        encoder = InputEncoder(model, body, "input" if isinstance(sent, OllamaEmbedBody) else "prompt")
        return await VectorCall(body, request, context, model, encoder, sent).vectors(inputs, pooling, "embd")
