"""POST /v1/decisions: answers typed questions about an input with probabilities, without generating text."""

import secrets
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.formats.reasoning import reasoning_switch
from weft.server.generate.decide import decide
from weft.server.http.context import ServerContext, get_context
from weft.server.render.decisions import render_decision
from weft.server.request.body import BodyRoute
from weft.server.request.cache_options import find_breakpoints, uses_cache
from weft.server.request.decision_input import chat_of
from weft.server.request.decision_questions import read_questions
from weft.server.request.fields import REFUSED_EVERYWHERE, ignored_fields, ignored_header
from weft.server.request.messages import template_messages
from weft.server.request.read_body import read_task
from weft.server.request.task import Chat, OutputWishes, Task, Texts
from weft.server.schemas.common import GenerationBody
from weft.server.schemas.decisions import DecisionBody
from weft.server.text.chat_template import TemplateOptions

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/decisions")
async def create_decision(
    body: DecisionBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Answer questions about an input."""
    model, workers, size = await context.check_model(request, body.model), context.workers, len(await request.body())
    strict = context.settings.strict_params
    ignored = await workers.run_light(size, ignored_fields, body, REFUSED_EVERYWHERE, strict=strict)
    messages = await workers.run_light(size, chat_of, body.input)
    breakpoints = find_breakpoints(messages, body.prompt_cache_options)
    switch = reasoning_switch(model.formats.template)
    options = TemplateOptions(variables=switch.off if switch else {})
    chat = Chat(await workers.run_light(size, template_messages, messages, model.formats.tools), options, breakpoints)
    asked = await workers.run_light(size, read_questions, body.questions)
    task = await _read_task(
        body, request, context, is_cached=uses_cache(body.prompt_cache_options) or bool(breakpoints)
    )
    scores, counts = await decide(chat, asked, task, request, context)
    least = context.settings.decision_refusal_below
    answer = await workers.run_light(size, render_decision, body.questions, scores, counts, task.name, least)
    return Response(answer, headers=ignored_header(ignored), media_type="application/json")


async def _read_task(body: DecisionBody, request: Request, context: ServerContext, *, is_cached: bool) -> Task:
    """What the requests for all questions have in common.

    The questions share the blocks of their input even if the caller wants no caching, but with nobody else.
    """
    common = GenerationBody(
        model=body.model,
        temperature=0.0,
        service_tier=body.service_tier,
        priority=body.priority,
        prompt_cache_key=body.prompt_cache_key,
        cache_salt=body.cache_salt if is_cached else secrets.token_hex(16),
    )
    return await read_task(
        common,
        request,
        context,
        {},
        input=Texts(None),
        wishes=OutputWishes(),
        max_tokens=1,
        logprobs=0,
        prompt_logprobs=None,
        user=body.safety_identifier,
    )
