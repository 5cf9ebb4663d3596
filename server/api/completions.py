"""POST /v1/completions: turns a body into a task."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.generate.pipeline import respond
from weft.server.http.begun_stream import begun_while_loading
from weft.server.http.context import ServerContext, get_context
from weft.server.render.common import render_options, stream_error
from weft.server.render.completions import CompletionRenderer
from weft.server.request.completion_task import completion_task, shown_logprobs
from weft.server.schemas.completions import CompletionBody
from weft.server.task.body import BodyRoute

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions")
async def create_completion(
    body: CompletionBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Continue one prompt or several, streamed or whole."""
    return await begun_while_loading(_answer(body, request, context), body, context, stream_error)


async def _answer(body: CompletionBody, request: Request, context: ServerContext) -> Response:
    task = await completion_task(body, request, context)
    options = render_options(body, shown_logprobs(body))
    return await respond(task, request, context, partial(CompletionRenderer, task, options, echo=bool(body.echo)))
