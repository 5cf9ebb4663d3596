"""Gets the vectors of many prompts from the engine, and writes them as the JSON of each endpoint.

A bounded number of prompts is in the engine at a time, so that others get their turn. Whoever is cancelled leaves
nothing in the engine.
"""

import asyncio
import base64
import logging
import secrets
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from operator import mul

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.wire.messages import AddRequest, FinishReason
from weft.engine.wire.params import PooledOutput, Pooling, SamplingParams, VectorInfo
from weft.server import errors
from weft.server.http.auth import tenant_of
from weft.server.http.context import ServerContext
from weft.server.http.metrics import RequestTimer
from weft.server.models.served_model import ServedModel
from weft.server.task.request_options import deadline_of
from weft.server.task.validation import REFUSED_EVERYWHERE, check_range, ignored_fields, ignored_header
from weft.server.task.vectors import Embedding, Hidden, Input, InputEncoder, VectorBody, VectorUsage

MAX_IN_FLIGHT = 64
"""Most prompts of one call in the engine at once: enough to fill its steps."""
MAX_IN_FLIGHT_PER_TOKEN = 2
"""The same for the hidden states of all tokens, of which an answer may have 16 MiB."""
MAX_HIDDEN_VALUES = 1 << 24
"""Most values of the hidden states of all tokens of one call, which are held until all are there: 64 MiB."""
MAX_LISTED_VALUES = 1 << 23
"""The same if they are written as numbers, 20 bytes each."""

_NO_OUTPUT = SamplingParams(max_tokens=0)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of one body.

    Attributes:
        outputs: One for each input, in order.
        ignored: Fields of the body that have no effect.
    """

    id: str
    created: int
    name: str
    outputs: Sequence[PooledOutput]
    usage: VectorUsage
    ignored: Sequence[str]


@dataclass(frozen=True, slots=True)
class VectorCall:
    """One call: its body, what it is sent by, and the model that answers.

    Attributes:
        sent: The body as it came, if `body` was made from it; None if they are the same.
    """

    body: VectorBody
    request: Request
    context: ServerContext
    model: ServedModel
    encoder: InputEncoder
    sent: BaseModel | None = None

    async def vectors(self, inputs: Sequence[Input], pooling: Pooling, id_prefix: str) -> Vectors:
        """Encode the inputs and get their vectors.

        Raises:
            ApiError: An input does not fit, or the engine rejected or gave up one.
        """
        body, context, model = self.body, self.context, self.model
        ignored = ignored_fields(self.sent or body, REFUSED_EVERYWHERE, strict=context.settings.strict_params)
        prompts = await self.encoder.encode(inputs, context.workers)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        if pooling.is_per_token and model.engine_info.vectors is not None:
            num_values = sum(lengths) * (pooling.dimensions or model.engine_info.vectors.hidden_size)
            is_packed = getattr(body, "encoding_format", None) == "base64"
            most = MAX_HIDDEN_VALUES if is_packed else MAX_LISTED_VALUES
            name = f"the number of values of all hidden states{'' if is_packed else ', if not in base64,'}"
            check_range(name, num_values, 1, most, param="input")
        deadline = deadline_of(self.request, is_stream=False, ping_s=0)
        salt, tenant = body.cache_salt or "", tenant_of(self.request)
        timer = RequestTimer(context.metrics.of(model.name), self.request.state.arrival_time, len(prompts))
        timer.accept(lengths)

        async def one(index: int) -> PooledOutput:
            add = AddRequest(
                prompts[index],
                _NO_OUTPUT,
                tenant=tenant,
                deadline=deadline,
                cache_salt=salt,
                adapter=model.adapter,
                pooling=pooling,
            )
            reason = FinishReason.ABORT
            try:
                output = await _pooled(model, add)
                reason = FinishReason.STOP
            finally:
                timer.finish_choice(index, reason, 0)
            return output

        outputs = await _bounded(one, len(prompts), MAX_IN_FLIGHT_PER_TOKEN if pooling.is_per_token else MAX_IN_FLIGHT)
        num_tokens = sum(lengths)
        name = body.model or model.name
        usage = VectorUsage(num_tokens, num_tokens)
        return Vectors(f"{id_prefix}-{secrets.token_hex(12)}", int(time.time()), name, outputs, usage, ignored)


async def _bounded(one: Callable[[int], Awaitable[PooledOutput]], number: int, bound: int) -> list[PooledOutput]:
    """Await one(0) to one(number - 1), at most `bound` at once; the first error cancels the others."""
    outputs: dict[int, PooledOutput] = {}
    indices = iter(range(number))

    async def work() -> None:
        for index in indices:
            outputs[index] = await one(index)

    tasks = [asyncio.create_task(work()) for _ in range(min(bound, number))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [outputs[index] for index in range(number)]


async def _pooled(model: ServedModel, add: AddRequest) -> PooledOutput:
    generation = await model.engine_client.generate(add)
    try:
        async for output in generation:
            if isinstance(output, PooledOutput):
                return output
            if output.finish_reason is FinishReason.TIMEOUT:
                raise errors.DeadlineError("the client's deadline passed while the request waited")
            if output.finish_reason is FinishReason.ABORT:
                break
            _log.error("the engine gave a request up: %s", output.message)
            raise errors.InternalError("the engine failed on this request; the server's log has the details")
    finally:
        generation.close()
    raise errors.EngineRestartingError("the engine stopped this request; try again")


def embedding(index: int, output: PooledOutput, encoding: str | None) -> Embedding:
    """An entry of POST /v1/embeddings."""
    return Embedding(index, encoded(output, encoding))


def hidden(index: int, output: PooledOutput, encoding: str | None, *, is_per_token: bool) -> Hidden:
    """An entry of POST /pooling."""
    if encoding == "base64" or not is_per_token:
        return Hidden(index, encoded(output, encoding))
    values = array("f", output.values)
    width = len(values) // output.num_rows
    # Row by row: no other thread runs while one call encodes, and lists take ten times as much memory as the values.
    rows = [msgspec.json.encode(values[start : start + width].tolist()) for start in range(0, len(values), width)]
    return Hidden(index, msgspec.Raw(b"[%s]" % b",".join(rows)))


def encoded(output: PooledOutput, encoding: str | None) -> list[float] | str:
    """The values in the form that the body asks for."""
    return base64.b64encode(output.values).decode() if encoding == "base64" else values_of(output)


def values_of(output: PooledOutput) -> list[float]:
    """The values, row after row."""
    return array("f", output.values).tolist()


def cosine(first: PooledOutput, second: PooledOutput) -> float:
    """The cosine of the angle between two vectors; 0 if one has no direction."""
    a, b = values_of(first), values_of(second)
    norms = sum(map(mul, a, a)) * sum(map(mul, b, b))
    return sum(map(mul, a, b)) / norms**0.5 if norms else 0.0


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
        raise errors.UnsupportedValueError(message, param="dimensions")
    if info.dimensions and dimensions not in info.dimensions:
        allowed = ", ".join(map(str, info.dimensions))
        raise errors.InvalidRequestError(f"dimensions must be one of {allowed}, got {dimensions}", param="dimensions")
    return check_range("dimensions", dimensions, 1, info.size)


def vector_info(model: ServedModel) -> VectorInfo:
    """What the vectors of a model are that makes some."""
    info = model.engine_info.vectors
    assert info is not None, "its task was checked"
    return info


async def answer(context: ServerContext, vectors: Vectors, build: Callable[[], msgspec.Struct]) -> Response:
    """The response with the answer that `build` makes, in a thread if it is long."""
    size = sum(len(output.values) for output in vectors.outputs)
    content = await context.workers.run(size, lambda: msgspec.json.encode(build()))
    return Response(content, headers=ignored_header(vectors.ignored), media_type="application/json")
