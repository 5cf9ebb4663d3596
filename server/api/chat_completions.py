"""POST /v1/chat/completions: turns a body into a task."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.server.errors import InvalidRequestError, UnsupportedParameterError
from weft.server.formats.detection import OutputFormats
from weft.server.generate.pipeline import respond
from weft.server.http.context import ServerContext, get_context
from weft.server.render.chat import ChatRenderer
from weft.server.render.common import render_options
from weft.server.request.body import BodyRoute
from weft.server.request.cache_options import find_breakpoints
from weft.server.request.fields import REFUSED_IN_CHAT
from weft.server.request.messages import template_messages, text_of
from weft.server.request.params import MAX_LOGPROBS, num_prompt_logprobs
from weft.server.request.read_body import read_task
from weft.server.request.structured_output import structure_of
from weft.server.request.task import Chat, OutputWishes
from weft.server.request.template_options import template_options
from weft.server.request.thinking import read_thinking
from weft.server.request.tool_use import tool_use
from weft.server.request.validation import check_range
from weft.server.schemas.chat_completions import ChatCompletionBody

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(
    body: ChatCompletionBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Answer a conversation, streamed or whole."""
    model, workers, size = await context.check_model(request, body.model), context.workers, len(await request.body())
    logprobs = _logprobs(body)
    wishes = await workers.run_light(size, _read_wishes, body, model.formats)
    breakpoints = find_breakpoints(body.messages, body.prompt_cache_options)
    options = template_options(body, model.tokenizer, wishes.variables)
    messages = await workers.run_light(size, template_messages, body.messages, model.formats.tools)
    task = await read_task(
        body,
        request,
        context,
        REFUSED_IN_CHAT,
        input=Chat(messages, options, breakpoints),
        wishes=wishes,
        max_tokens=0 if body.prewarm else _max_tokens(body),
        logprobs=logprobs,
        prompt_logprobs=num_prompt_logprobs(body),
        user=body.safety_identifier or body.user,
    )
    return await respond(task, request, context, partial(ChatRenderer, task, render_options(body, logprobs)))


def _read_wishes(body: ChatCompletionBody, formats: OutputFormats) -> OutputWishes:
    """Read the fields about tools, structure and reasoning.

    Raises:
        InvalidRequestError: One of them is wrong.
        UnsupportedParameterError: There are tools, but the model's chat template does not show tools.
    """
    use = tool_use(body)
    if use is not None and formats.tools is None:
        raise UnsupportedParameterError(
            f"{use.param} cannot be used: the chat template of this model shows no tools", param=use.param
        )
    prediction = text_of(body.prediction.content, "prediction.content", "") if body.prediction else ""
    return OutputWishes(use, structure_of(body), read_thinking(body, formats), prediction)


def _max_tokens(body: ChatCompletionBody) -> int | None:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(body, name)
    if max_tokens is not None:
        check_range(name, max_tokens, 1, None)
    return max_tokens


def _logprobs(body: ChatCompletionBody) -> int | None:
    """Number of most probable alternatives per token; None if logprobs were not requested."""
    top_logprobs = check_range("top_logprobs", body.top_logprobs or 0, 0, MAX_LOGPROBS)
    if body.logprobs or body.logprob_token_ids:
        return top_logprobs
    if top_logprobs:
        raise InvalidRequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    return None
