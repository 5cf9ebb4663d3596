"""POST /v1/decisions and /v1/systemone: answer typed questions with probabilities, without generating text.

The answers come from the probabilities of the labels of each question. They have the shape of the body: OpenAI's,
SGLang's or System One's. In the latter two there is one answer for each id.
"""

import math
import secrets
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weft.server.apis.decisions import questions as question_forms
from weft.server.apis.decisions import schema as wire
from weft.server.apis.decisions.decide import decide
from weft.server.errors import InvalidRequestError, UnprocessableError
from weft.server.formats.reasoning import reasoning_switch
from weft.server.generate.events import Counts
from weft.server.http.context import Context, ServerContext
from weft.server.task.bodies import Message
from weft.server.task.body import BodyRoute
from weft.server.task.messages import template_messages
from weft.server.task.read_body import read_task
from weft.server.task.request_options import find_breakpoints, uses_cache
from weft.server.task.schema import CachedTokens, GenerationBody
from weft.server.task.task import Chat, OutputWishes, Texts
from weft.server.task.validation import REFUSED_EVERYWHERE, as_missing_body, ignored_fields, ignored_header
from weft.server.text.chat_template import TemplateOptions

Scores = Sequence[Sequence[float]]
"""For each question, what the model gives each of its answers."""


def render_decision(
    questions: Sequence[wire.DecisionQuestion], scores: Scores, counts: Counts, name: str, least: float
) -> bytes:
    """The whole answer in OpenAI's shape.

    Args:
        scores: Logarithms of the labels' probabilities, by question.
        name: The model's name.
        least: If the labels of a question have less probability together, it is refused.
    """
    answers = [_answer_object(question, logs, least) for question, logs in zip(questions, scores, strict=True)]
    cached = CachedTokens(counts.cached_tokens, counts.cache_write_tokens)
    usage = wire.DecisionUsage(counts.prompt_tokens, cached, counts.prompt_tokens)
    return msgspec.json.encode(wire.Decision(answers, name, usage))


def _answer_object(question: wire.DecisionQuestion, logs: Sequence[float], least: float) -> wire.DecisionAnswer:
    mass, shares = label_mass(logs), softmax(logs)
    answer = wire.DecisionAnswer(type=question.type, name=question.name, x_label_mass=mass)
    if mass < least:
        answer.type = "refusal"
    elif question.type == "predicate":
        answer.probability = shares[0]
    elif question.type == "choice":
        values = [choice.value for choice in question.choices or ()]
        answer.choice = values[shares.index(max(shares))]
        answer.confidence = choice_confidence(shares)
        answer.probabilities = [wire.ValueProbability(*pair) for pair in zip(values, shares, strict=True)]
    else:
        answer.score = expected_level(shares)
        answer.confidence = score_confidence(shares)
        levels = enumerate(zip(shares, question.levels or (), strict=True))
        answer.probabilities = [wire.ValueProbability(i, share, level.label) for i, (share, level) in levels]
    return answer


def render_sglang(
    named: Sequence[question_forms.Named], scores: Scores, counts: Counts, name: str, temperature: float
) -> bytes:
    """The whole answer in SGLang's shape. The temperature changes the probabilities and not the label mass."""
    answers: dict[str, dict[str, Any]] = {}
    for question, logs in zip(named, scores, strict=True):
        shares = softmax(logs, temperature)
        answers[question.id] = {
            "type": question.type,
            **({"choice": _best(question, shares)} if question.type == "choice" else {}),
            **({"score": expected_level(shares)} if question.type == "score" else {}),
            "probabilities": dict(zip(question.names, shares, strict=True)),
            "label_mass": label_mass(logs),
        }
    num_tokens = counts.prompt_tokens
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    version = question_forms.PROMPT_FORMAT_VERSION
    return msgspec.json.encode({"model": name, "prompt_format_version": version, "answers": answers, "usage": usage})


def render_systemone(named: Sequence[question_forms.Named], scores: Scores, counts: Counts, name: str) -> bytes:
    """The whole answer in System One's shape."""
    answers = {question.id: _answer_in_shape(question, logs) for question, logs in zip(named, scores, strict=True)}
    usage = {"input_tokens": counts.prompt_tokens, "output_tokens": 0}
    return msgspec.json.encode({"model": name, "answers": answers, "usage": usage})


def _answer_in_shape(question: question_forms.Named, logs: Sequence[float]) -> dict[str, Any]:
    shares = softmax(logs)
    answer: dict[str, Any] = {"type": question.type, "x_label_mass": label_mass(logs)}
    if question.type == "noul":
        return {**answer, "noul": shares[0]}
    answer["probabilities"] = dict(zip(question.names, shares, strict=True))
    if question.type == "choice":
        return {**answer, "choice": _best(question, shares), "confidence": choice_confidence(shares)}
    legend = dict(zip(question.names, question.details, strict=True))
    return {**answer, "score": expected_level(shares), "confidence": score_confidence(shares), "legend": legend}


def _best(question: question_forms.Named, shares: Sequence[float]) -> str:
    return question.names[shares.index(max(shares))]


def softmax(logs: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Probabilities that are proportional to those whose logarithms are given, at this temperature."""
    top = max(logs)
    weights = [math.exp((log - top) / temperature) for log in logs]
    return [weight / sum(weights) for weight in weights]


def label_mass(logs: Sequence[float]) -> float:
    """How probable it is that the model writes one of the labels."""
    return min(1.0, sum(map(math.exp, logs)))


def expected_level(shares: Sequence[float]) -> float:
    """The mean of the levels' indices."""
    return sum(i * share for i, share in enumerate(shares))


def choice_confidence(shares: Sequence[float]) -> float:
    """0 if all are equally probable, 1 if one is certain."""
    n = len(shares)
    return 1.0 if n == 1 else min(1.0, max(0.0, (n * max(shares) - 1) / (n - 1)))


def score_confidence(shares: Sequence[float]) -> float:
    """1 less the mean distance from the most probable level, relative to the mean distance from the middle."""
    n, top = len(shares), shares.index(max(shares))
    spread = sum(abs(i - (n - 1) / 2) for i in range(n)) / n
    distance = sum(share * abs(i - top) for i, share in enumerate(shares))
    return 1.0 if n == 1 else max(0.0, 1 - distance / spread)


class SchemaRoute(BodyRoute):
    """A route on which a body that is missing, or does not match the schema, is a 422."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Override the handler: change the status of such errors."""
        handle = super().get_route_handler()

        async def handle_schema(request: Request) -> Response:
            try:
                return await handle(request)
            except HTTPException as exc:  # FastAPI reports every body error as a parse error
                with _unprocessable():
                    raise (exc.__cause__ or exc) from None
            except RequestValidationError as exc:
                with _unprocessable():
                    raise as_missing_body(exc) from None

        return handle_schema


@contextmanager
def _unprocessable() -> Generator[None, None, None]:
    try:
        yield
    except InvalidRequestError as exc:
        raise UnprocessableError(exc.message, param=exc.param) from None


router = APIRouter(route_class=BodyRoute)


@router.post("/v1/decisions")
async def create_decision(body: wire.AnyDecisionBody, request: Request, context: Context) -> Response:
    """Answer questions about an input. The questions tell whether the shape is OpenAI's, SGLang's or System One's."""
    given = body.root
    if isinstance(given, wire.SystemOneBody):
        return await create_systemone(given, request, context)
    workers, size = context.workers, len(await request.body())
    if isinstance(given, wire.DecisionBody):
        asked = await workers.run_light(size, question_forms.read_questions, given.questions)
        least = context.settings.decision_refusal_below
        messages = await workers.run_light(size, question_forms.chat_of, given.input)
        render = partial(render_decision, given.questions, least=least)
        return await _answer_of_body(given, messages, asked, render, REFUSED_EVERYWHERE, request, context)
    named = await workers.run_light(size, question_forms.read_sglang, given)
    messages = await workers.run_light(size, _message_of, given.input, "input")
    render = partial(render_sglang, named, temperature=given.temperature)
    asked = [question.asked for question in named]
    return await _answer_of_body(
        given, messages, asked, render, question_forms.REFUSED_IN_SGLANG_DECISIONS, request, context
    )


async def create_systemone(body: wire.SystemOneBody, request: Request, context: Context) -> Response:
    """Answer questions about a state."""
    workers, size = context.workers, len(await request.body())
    with _unprocessable():
        named = await workers.run_light(size, question_forms.read_systemone, body)
        messages = await workers.run_light(size, _message_of, body.state, "state")
    render = partial(render_systemone, named)
    asked = [question.asked for question in named]
    return await _answer_of_body(body, messages, asked, render, question_forms.REFUSED_IN_SYSTEMONE, request, context)


def _message_of(value: wire.JsonText, at: str) -> list[Message]:
    return question_forms.chat_of(question_forms.text_of(value, at), at)


async def _answer_of_body(
    body: BaseModel,
    messages: list[Message],
    asked: Sequence[question_forms.Asked],
    render: Callable[..., bytes],
    refused: Mapping[str, tuple[object, ...]],
    request: Request,
    context: ServerContext,
) -> Response:
    """Score the questions about the messages, and write the answer.

    The questions share the blocks of their input even if the caller wants no caching, but with nobody else.

    Args:
        body: Its fields about the model, the template and the cache are read, as far as its shape has them.
        render: Called with the scores, the token counts and the model's name.
    """
    fields: Mapping[str, Any] = dict(body)
    model, workers = await context.check_model(request, fields["model"]), context.workers
    size, cache = len(await request.body()), fields.get("prompt_cache_options")
    ignored = await workers.run_light(size, ignored_fields, body, refused, strict=context.settings.strict_params)
    breakpoints = find_breakpoints(messages, cache)
    variables = question_forms.thinking_off(
        reasoning_switch(model.formats.template), fields.get("chat_template_kwargs")
    )
    shown = await workers.run_light(size, template_messages, messages, model.formats.tools)
    is_cached = uses_cache(cache) or bool(breakpoints)
    common = GenerationBody(
        model=fields["model"],
        temperature=0.0,
        service_tier=fields.get("service_tier"),
        priority=fields.get("priority"),
        cache_salt=fields.get("cache_salt") if is_cached else secrets.token_hex(16),
    )
    task = await read_task(
        common,
        request,
        context,
        {},
        input=Texts(None),
        wishes=OutputWishes(),
        max_tokens=1,
        logprobs=0,
        user=fields.get("safety_identifier"),
    )
    chat = Chat(shown, TemplateOptions(variables=variables), breakpoints)
    scores, counts = await decide(chat, asked, task, request, context)
    answer = await workers.run_light(size, partial(render, scores=scores, counts=counts, name=task.name))
    return Response(answer, headers=ignored_header(ignored), media_type="application/json")


router.add_api_route("/v1/systemone", create_systemone, methods=["POST"], route_class_override=SchemaRoute)
