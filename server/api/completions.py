"""POST /v1/completions: turns a body into a task."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, cast

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.errors import InvalidRequestError
from weft.server.generate.pipeline import respond
from weft.server.http.context import ServerContext, get_context
from weft.server.render.common import render_options
from weft.server.render.completions import CompletionRenderer
from weft.server.request.body import BodyRoute
from weft.server.request.fields import REFUSED_IN_COMPLETIONS
from weft.server.request.fim import FillIn, fill_in
from weft.server.request.params import MAX_LOGPROBS, num_prompt_logprobs
from weft.server.request.read_body import read_task
from weft.server.request.structured_output import structure_of
from weft.server.request.task import OutputWishes, Texts
from weft.server.request.validation import check_range
from weft.server.schemas.completions import CompletionBody
from weft.server.text.text_tokenizer import TextTokenizer

DEFAULT_MAX_TOKENS = 16

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions")
async def create_completion(
    body: CompletionBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Continue one prompt or several, streamed or whole."""
    size = len(await request.body())
    num_made = _num_made(body, context.settings.max_n)
    filling = _filling(body, (await context.check_model(request, body.model)).tokenizer)
    logprobs = _logprobs(body)
    items = _items(body.prompt)
    if items is not None:  # more prompts would never fit the queue; refuse them before any work
        check_range("the number of prompts", len(items), 0, context.settings.max_num_waiting, param="prompt")
    task = await read_task(
        body,
        request,
        context,
        REFUSED_IN_COMPLETIONS,
        input=Texts(items, body.add_special_tokens is not False, body.suffix or "", filling),
        wishes=OutputWishes(structure=await context.workers.run_light(size, structure_of, body)),
        max_tokens=_max_tokens(body),
        logprobs=logprobs,
        prompt_logprobs=num_prompt_logprobs(body, logprobs if body.echo else None),
        num_made=num_made,
        user=body.user,
    )
    options = render_options(body, logprobs)
    return await respond(task, request, context, partial(CompletionRenderer, task, options, echo=bool(body.echo)))


def _max_tokens(body: CompletionBody) -> int:
    if body.prewarm:
        return 0
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return check_range("max_tokens", max_tokens, 0 if body.echo else 1, None)


def _logprobs(body: CompletionBody) -> int | None:
    """Number of most probable alternatives per token; None if logprobs were not requested."""
    if body.logprobs is None:
        return 0 if body.logprob_token_ids else None
    return check_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)


def _filling(body: CompletionBody, tokenizer: TextTokenizer) -> FillIn | None:
    """How this vocabulary asks for the text before the suffix; None if there is no suffix."""
    if not body.suffix:
        return None
    if body.echo:
        raise InvalidRequestError("echo cannot be used with suffix", param="echo")
    return fill_in(tokenizer)


def _num_made(body: CompletionBody, max_n: int) -> int | None:
    """Number of choices that the engine generates for each prompt; None: as many as are returned."""
    n = 1 if body.n is None else body.n
    if body.best_of is None:
        return None
    check_range("best_of", body.best_of, n, max_n)
    if body.stream and body.best_of > n:
        raise InvalidRequestError("best_of cannot be used with stream: the best is known at the end", param="best_of")
    return body.best_of


def _items(prompt: str | Sequence[str | int | list[int]] | None) -> list[tuple[str, str | list[int]]] | None:
    """Each prompt with its path in the body. A list of numbers is one prompt."""
    if prompt is None:
        return None
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if prompt and isinstance(prompt[0], int):
        return [("prompt", cast(list[int], prompt))]
    return [(f"prompt[{i}]", item) for i, item in enumerate(cast(Sequence[str | list[int]], prompt))]
