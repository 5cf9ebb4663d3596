"""POST /completion and /infill, in llama.cpp's shape: turns a body into a task."""

from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.generate.pipeline import respond
from weft.server.http.context import ServerContext, get_context
from weft.server.render.llama_cpp import LlamaCppRenderer
from weft.server.request.completion_task import completion_task
from weft.server.request.llama_cpp_body import REFUSED_IN_LLAMA_CPP, RENAMED, completion_of
from weft.server.request.validation import renamed, renaming
from weft.server.schemas.llama_cpp import InfillBody, LlamaCppCompletionBody
from weft.server.task.body import BodyRoute

router = APIRouter(route_class=BodyRoute)

Context = Annotated[ServerContext, Depends(get_context)]


@router.post("/completion")
async def complete(body: LlamaCppCompletionBody, request: Request, context: Context) -> Response:
    """Continue a prompt, streamed or whole."""
    return await _answer(body, request, context)


@router.post("/infill")
async def infill(body: InfillBody, request: Request, context: Context) -> Response:
    """Write what stands between two texts, streamed or whole."""
    return await _answer(body, request, context)


async def _answer(body: LlamaCppCompletionBody | InfillBody, request: Request, context: ServerContext) -> Response:
    with renaming(RENAMED):
        made = await context.workers.run_light(len(await request.body()), completion_of, body)
        task = await completion_task(made, request, context, sent=body, refused=REFUSED_IN_LLAMA_CPP, is_bounded=False)
        task = replace(task, ignored=[renamed(name, RENAMED) for name in task.ignored], fits_context=True)
        return await respond(task, request, context, partial(LlamaCppRenderer, task, body.n_probs or 0))
