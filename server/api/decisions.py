"""POST /v1/decisions and /v1/systemone: answer typed questions with probabilities, without generating text."""

import secrets
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weft.server.errors import InvalidRequestError, UnprocessableError
from weft.server.formats.reasoning import reasoning_switch
from weft.server.generate.decide import decide
from weft.server.http.context import ServerContext, get_context
from weft.server.render.decision_shapes import render_sglang, render_systemone
from weft.server.render.decisions import render_decision
from weft.server.request.cache_options import find_breakpoints, uses_cache
from weft.server.request.decision_input import chat_of
from weft.server.request.decision_questions import Asked, read_questions
from weft.server.request.decision_shapes import read_sglang, read_systemone, text_of, thinking_off
from weft.server.request.fields import (
    REFUSED_EVERYWHERE,
    REFUSED_IN_SGLANG_DECISIONS,
    REFUSED_IN_SYSTEMONE,
    ignored_fields,
    ignored_header,
)
from weft.server.request.messages import template_messages
from weft.server.request.read_body import read_task
from weft.server.request.validation import as_missing_body
from weft.server.schemas.chat_completions import Message
from weft.server.schemas.common import GenerationBody
from weft.server.schemas.decision_shapes import AnyDecisionBody, JsonText, SystemOneBody
from weft.server.schemas.decisions import DecisionBody
from weft.server.task.body import BodyRoute
from weft.server.task.task import Chat, OutputWishes, Texts
from weft.server.text.chat_template import TemplateOptions


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
Context = Annotated[ServerContext, Depends(get_context)]


@router.post("/v1/decisions")
async def create_decision(body: AnyDecisionBody, request: Request, context: Context) -> Response:
    """Answer questions about an input. The questions tell whether the shape is OpenAI's, SGLang's or System One's."""
    given = body.root
    if isinstance(given, SystemOneBody):
        return await create_systemone(given, request, context)
    workers, size = context.workers, len(await request.body())
    if isinstance(given, DecisionBody):
        asked = await workers.run_light(size, read_questions, given.questions)
        least = context.settings.decision_refusal_below
        messages = await workers.run_light(size, chat_of, given.input)
        render = partial(render_decision, given.questions, least=least)
        return await _answer(given, messages, asked, render, REFUSED_EVERYWHERE, request, context)
    named = await workers.run_light(size, read_sglang, given)
    messages = await workers.run_light(size, _message_of, given.input, "input")
    render = partial(render_sglang, named, temperature=given.temperature)
    asked = [question.asked for question in named]
    return await _answer(given, messages, asked, render, REFUSED_IN_SGLANG_DECISIONS, request, context)


async def create_systemone(body: SystemOneBody, request: Request, context: Context) -> Response:
    """Answer questions about a state."""
    workers, size = context.workers, len(await request.body())
    with _unprocessable():
        named = await workers.run_light(size, read_systemone, body)
        messages = await workers.run_light(size, _message_of, body.state, "state")
    render = partial(render_systemone, named)
    asked = [question.asked for question in named]
    return await _answer(body, messages, asked, render, REFUSED_IN_SYSTEMONE, request, context)


def _message_of(value: JsonText, at: str) -> list[Message]:
    return chat_of(text_of(value, at), at)


async def _answer(
    body: BaseModel,
    messages: list[Message],
    asked: Sequence[Asked],
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
    variables = thinking_off(reasoning_switch(model.formats.template), fields.get("chat_template_kwargs"))
    shown = await workers.run_light(size, template_messages, messages, model.formats.tools)
    is_cached = uses_cache(cache) or bool(breakpoints)
    common = GenerationBody(
        model=fields["model"],
        temperature=0.0,
        service_tier=fields.get("service_tier"),
        priority=fields.get("priority"),
        prompt_cache_key=fields.get("prompt_cache_key"),
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
        prompt_logprobs=None,
        user=fields.get("safety_identifier"),
    )
    chat = Chat(shown, TemplateOptions(variables=variables), breakpoints)
    scores, counts = await decide(chat, asked, task, request, context)
    answer = await workers.run_light(size, partial(render, scores=scores, counts=counts, name=task.name))
    return Response(answer, headers=ignored_header(ignored), media_type="application/json")


router.add_api_route("/v1/systemone", create_systemone, methods=["POST"], route_class_override=SchemaRoute)
