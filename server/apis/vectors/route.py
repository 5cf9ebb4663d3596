"""The routes that turn texts into vectors, classes and scores: embeddings, pooling, classify, score and rerank."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.wire.params import PooledOutput, Pooling
from weft.server.errors import InvalidRequestError, UnsupportedValueError
from weft.server.generate import vectors as vector_calls
from weft.server.http.context import Context, ServerContext
from weft.server.task import vectors as wire
from weft.server.task.body import BodyRoute
from weft.server.task.validation import check_range, require_task

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/embeddings")
async def create_embeddings(body: wire.EmbeddingBody, request: Request, context: Context) -> Response:
    """The vector of each input."""
    model = await context.check_model(request, body.model)
    require_task(model, "embed")
    inputs = wire.prompted(wire.as_list(body.input), model, body.prompt_name, body.input_type)
    pooling = Pooling(dimensions=vector_calls.check_dimensions(body.dimensions, model), is_finished=body.normalize)
    call = vector_calls.VectorCall(body, request, context, model, wire.InputEncoder(model, body, "input"))
    vectors = await call.vectors(inputs, pooling, "embd")

    def entries() -> list[wire.Embedding]:
        return [
            vector_calls.embedding(index, output, body.encoding_format) for index, output in enumerate(vectors.outputs)
        ]

    return await vector_calls.answer(context, vectors, lambda: _listed(vectors, entries()))


@router.post("/pooling")
async def pool(body: wire.PoolingBody, request: Request, context: Context) -> Response:
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
    pooling = Pooling(is_per_token, vector_calls.check_dimensions(body.dimensions, model), is_finished)
    call = vector_calls.VectorCall(body, request, context, model, wire.InputEncoder(model, body, "input"))
    vectors = await call.vectors(wire.as_list(body.input), pooling, "pool")

    def entries() -> list[wire.Hidden]:
        outputs = enumerate(vectors.outputs)
        return [
            vector_calls.hidden(index, output, body.encoding_format, is_per_token=is_per_token)
            for index, output in outputs
        ]

    return await vector_calls.answer(context, vectors, lambda: _listed(vectors, entries()))


@router.post("/v1/classify")
@router.post("/classify")
async def classify(body: wire.ClassifyBody, request: Request, context: Context) -> Response:
    """The labels' probabilities for each input."""
    model = await context.check_model(request, body.model)
    require_task(model, "classify")
    labels = vector_calls.vector_info(model).labels
    call = vector_calls.VectorCall(body, request, context, model, wire.InputEncoder(model, body, "input"))
    vectors = await call.vectors(wire.as_list(body.input), Pooling(is_finished=body.use_activation), "classify")

    def entry(index: int, output: PooledOutput) -> wire.Class:
        probs = vector_calls.values_of(output)
        return wire.Class(index, labels[probs.index(max(probs))], probs, len(probs))

    entries = [entry(index, output) for index, output in enumerate(vectors.outputs)]
    return await vector_calls.answer(context, vectors, lambda: _listed(vectors, entries))


@router.post("/v1/score")
@router.post("/score")
async def score(body: wire.ScoreBody, request: Request, context: Context) -> Response:
    """The score of each pair."""
    firsts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    seconds = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    check_range("the number of texts in text_2", len(seconds), 1, wire.MAX_INPUTS, param="text_2")
    if len(firsts) not in (1, len(seconds)):
        message = f"text_1 must hold one text or as many as text_2, which has {len(seconds)}, got {len(firsts)}"
        raise InvalidRequestError(message, param="text_1")
    vectors, scores = await _scores(body, request, context, firsts, seconds, "text_2", "score")
    data = [wire.Score(index, value) for index, value in enumerate(scores)]
    return await vector_calls.answer(context, vectors, lambda: _listed(vectors, data))


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def rerank(body: wire.RerankBody, request: Request, context: Context) -> Response:
    """The documents, the most relevant first."""
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    check_range("the number of documents", len(texts), 1, wire.MAX_INPUTS, param="documents")
    top_n = len(texts) if body.top_n is None else check_range("top_n", body.top_n, 1, None)
    if body.max_tokens_per_doc is not None:
        check_range("max_tokens_per_doc", body.max_tokens_per_doc, 1, None)
    vectors, scores = await _scores(body, request, context, [body.query], texts, "documents", "rerank")
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[:top_n]
    shown = [{"text": text} for text in texts] if body.return_documents else [None] * len(texts)
    results = [wire.Ranked(index, scores[index], shown[index]) for index in order]
    meta: dict[str, dict[str, str | int]] = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    ranking = wire.Ranking(vectors.id, vectors.name, results, vectors.usage, meta)
    return await vector_calls.answer(context, vectors, lambda: ranking)


async def _scores(
    body: wire.ScoreBody | wire.RerankBody,
    request: Request,
    context: ServerContext,
    firsts: list[str],
    seconds: list[str],
    param: str,
    id_prefix: str,
) -> tuple[vector_calls.Vectors, list[float]]:
    """The score of each pair; one first text goes with all others.

    A classifier with one label reads both texts at once. With a model for embeddings it is the cosine of two vectors,
    each with the checkpoint's prompt for queries or documents.
    """
    model = await context.check_model(request, body.model)
    require_task(model, "classify", "embed")
    is_embedder = model.engine_info.task == "embed"
    encoder = wire.InputEncoder(model, body, param, body.instruction, num_queries=len(firsts) if is_embedder else 0)
    if isinstance(body, wire.RerankBody):
        encoder.most_per_document = body.max_tokens_per_doc
    call = vector_calls.VectorCall(body, request, context, model, encoder)
    if is_embedder:
        if body.use_activation is not None:
            raise InvalidRequestError("use_activation needs a model for the task classify", param="use_activation")
        names = model.prompts.texts
        queries = wire.prompted(list(firsts), model, "query" if "query" in names else None, None)
        documents = wire.prompted(list(seconds), model, "document" if "document" in names else None, None)
        vectors = await call.vectors([*queries, *documents], Pooling(is_finished=True), id_prefix)
        first, others = vectors.outputs[: len(firsts)], vectors.outputs[len(firsts) :]
        pairs = zip(first if len(first) > 1 else [first[0]] * len(others), others, strict=True)
        size = sum(len(output.values) for output in others)
        return vectors, await context.workers.run(size, lambda: [vector_calls.cosine(a, b) for a, b in pairs])
    labels = vector_calls.vector_info(model).labels
    if len(labels) != 1:
        message = f"scores need a classifier with one label, and {model.name} has {len(labels)}"
        raise UnsupportedValueError(message, param="model")
    whole = firsts if len(firsts) > 1 else firsts * len(seconds)
    inputs: list[wire.Input] = list(zip(whole, seconds, strict=True))
    vectors = await call.vectors(inputs, Pooling(is_finished=body.use_activation), id_prefix)
    return vectors, [vector_calls.values_of(output)[0] for output in vectors.outputs]


def _listed(
    vectors: vector_calls.Vectors, data: list[wire.Embedding] | list[wire.Hidden] | list[wire.Class] | list[wire.Score]
) -> wire.VectorList:
    return wire.VectorList(vectors.id, vectors.created, vectors.name, data, vectors.usage)
