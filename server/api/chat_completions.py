"""POST /v1/chat/completions: turns a body into a task."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.generate.pipeline import respond
from weft.server.http.begun_stream import begun_while_loading
from weft.server.http.context import ServerContext, get_context
from weft.server.render.chat import ChatRenderer
from weft.server.render.common import render_options, stream_error
from weft.server.request.chat_task import chat_task, shown_logprobs
from weft.server.schemas.chat_completions import ChatCompletionBody
from weft.server.task.body import BodyRoute

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(
    body: ChatCompletionBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Answer a conversation, streamed or whole."""
    return await begun_while_loading(_answer(body, request, context), body, context, stream_error)


async def _answer(body: ChatCompletionBody, request: Request, context: ServerContext) -> Response:
    task = await chat_task(body, request, context)
    renderer = partial(ChatRenderer, task, render_options(body, shown_logprobs(body)))
    return await respond(task, request, context, renderer)
