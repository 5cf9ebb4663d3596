"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shape: turns a body into a task."""

from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.api.tokenize import count_chat_tokens
from weft.server.generate.pipeline import respond
from weft.server.http.begun_stream import begun_while_loading
from weft.server.http.context import ServerContext, get_context
from weft.server.render.messages import FRAMING, MessagesRenderer, stream_error
from weft.server.request.anthropic_body import (
    REFUSED_IN_MESSAGES,
    RENAMED,
    Conversation,
    conversation,
    count_conversation,
)
from weft.server.request.chat_task import chat_task
from weft.server.request.fields import ignored_header
from weft.server.request.validation import renamed, renaming
from weft.server.schemas.messages import CountTokensBody, MessagesBody, TokensCount
from weft.server.task.body import BodyRoute
from weft.server.task.task import Task

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/messages")
async def create_message(
    body: MessagesBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Answer a conversation, streamed or whole."""
    answer, error = _answer(body, request, context), partial(stream_error, request_id=request.state.request_id)
    return await begun_while_loading(answer, body, context, error, FRAMING)


async def _answer(body: MessagesBody, request: Request, context: ServerContext) -> Response:
    with renaming(RENAMED):
        made = await context.workers.run_light(len(await request.body()), conversation, body)
        task = replace(await _task(made, body, request, context), fits_context=True)
        new_renderer = partial(MessagesRenderer, task, request.state.request_id)
        return await respond(task, request, context, new_renderer, FRAMING)


@router.post("/v1/messages/count_tokens")
async def count_tokens(
    body: CountTokensBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Count the tokens of a conversation."""
    with renaming(RENAMED):
        made = await context.workers.run_light(len(await request.body()), count_conversation, body)
        task = await _task(made, body, request, context)
        answer = TokensCount(await count_chat_tokens(task, context.workers))
    return Response(msgspec.json.encode(answer), headers=ignored_header(task.ignored), media_type="application/json")


async def _task(made: Conversation, body: CountTokensBody, request: Request, context: ServerContext) -> Task:
    chat, breakpoints = made
    task = await chat_task(chat, request, context, sent=body, refused=REFUSED_IN_MESSAGES, breakpoints=breakpoints)
    effort = {"reasoning_effort": "thinking" if body.thinking else "output_config.effort"}
    return replace(task, ignored=[renamed(effort.get(name, name), RENAMED) for name in task.ignored])
