"""Builds the task from a completion body. Other APIs of prompts convert their bodies to one, and come here too."""

from collections.abc import Mapping, Sequence
from typing import cast

from pydantic import BaseModel
from starlette.requests import Request

from weft.server.errors import InvalidRequestError
from weft.server.http.context import ServerContext
from weft.server.request.fields import REFUSED_IN_COMPLETIONS
from weft.server.request.fim import FillIn, fill_in
from weft.server.request.params import MAX_LOGPROBS, num_prompt_logprobs
from weft.server.request.read_body import read_task
from weft.server.request.validation import check_range
from weft.server.schemas.completions import CompletionBody
from weft.server.task.structured_output import structure_of
from weft.server.task.task import OutputWishes, Task, Texts
from weft.server.text.text_tokenizer import TextTokenizer

DEFAULT_MAX_TOKENS = 16


async def completion_task(
    body: CompletionBody,
    request: Request,
    context: ServerContext,
    *,
    sent: BaseModel | None = None,
    refused: Mapping[str, tuple[object, ...]] = REFUSED_IN_COMPLETIONS,
    is_bounded: bool = True,
) -> Task:
    """Check every field, and build the task.

    Args:
        sent: See `chat_task`.
        refused: Fields that the endpoint refuses; see `ignored_fields`.
        is_bounded: Without `max_tokens` the output has few tokens; if not, it may fill the context.

    Raises:
        ApiError: A field is wrong, or the model is not served.
    """
    size = len(await request.body())
    num_made = _num_made(body, context.settings.max_n)
    filling = _filling(body, (await context.check_model(request, body.model)).tokenizer)
    logprobs = shown_logprobs(body)
    items = _items(body.prompt)
    if items is not None:  # more prompts would never fit the queue; refuse them before any work
        check_range("the number of prompts", len(items), 0, context.settings.max_num_waiting, param="prompt")
    return await read_task(
        body,
        request,
        context,
        refused,
        sent=sent,
        input=Texts(items, body.add_special_tokens is not False, body.suffix or "", filling),
        wishes=OutputWishes(structure=await context.workers.run_light(size, structure_of, body)),
        max_tokens=_max_tokens(body, is_bounded=is_bounded),
        logprobs=logprobs,
        prompt_logprobs=num_prompt_logprobs(body, logprobs if body.echo else None),
        num_made=num_made,
        user=body.user,
    )


def _max_tokens(body: CompletionBody, *, is_bounded: bool) -> int | None:
    if body.prewarm:
        return 0
    if body.max_tokens is None and not is_bounded:
        return None
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return check_range("max_tokens", max_tokens, 0 if body.echo else 1, None)


def shown_logprobs(body: CompletionBody) -> int | None:
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
