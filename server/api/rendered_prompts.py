"""POST /v1/chat/completions/render and /v1/completions/render: the ids that the engine would get, without generating.

Routers ask for them, to find the server that has the longest beginning of a prompt in its cache.
"""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.generate.prompts import PromptEncoder
from weft.server.http.context import ServerContext, get_context
from weft.server.request.chat_task import chat_task
from weft.server.request.completion_task import completion_task
from weft.server.request.fields import ignored_header
from weft.server.schemas.chat_completions import ChatCompletionBody
from weft.server.schemas.completions import CompletionBody
from weft.server.schemas.tokenize import RenderedPrompt
from weft.server.task.body import BodyRoute
from weft.server.task.task import Task

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions/render")
async def render_chat_completion(
    body: ChatCompletionBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """The prompt of a conversation."""
    task = await chat_task(body, request, context)
    (prompt,) = await _rendered(task, request, context)
    return _response(prompt, task)


@router.post("/v1/completions/render")
async def render_completion(
    body: CompletionBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Every prompt of a completion, in a list."""
    task = await completion_task(body, request, context)
    return _response(await _rendered(task, request, context), task)


async def _rendered(task: Task, request: Request, context: ServerContext) -> list[RenderedPrompt]:
    prompts, _ = await PromptEncoder(task, context.workers).prompts()
    return [RenderedPrompt(request.state.request_id, task.model.name, prompt.token_ids) for prompt in prompts]


def _response(answer: RenderedPrompt | list[RenderedPrompt], task: Task) -> Response:
    headers = ignored_header(task.ignored)
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")
