"""Builds the task from a chat body. Other APIs of conversations convert their bodies to one, and come here too."""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel
from starlette.requests import Request

from weft.server.errors import InvalidRequestError, UnsupportedParameterError
from weft.server.formats.detection import OutputFormats
from weft.server.http.context import ServerContext
from weft.server.request.cache_options import Breakpoint, find_breakpoints
from weft.server.request.fields import REFUSED_IN_CHAT
from weft.server.request.messages import template_messages, text_of
from weft.server.request.params import MAX_LOGPROBS, num_prompt_logprobs
from weft.server.request.read_body import read_task
from weft.server.request.template_options import template_options
from weft.server.request.thinking import read_thinking
from weft.server.request.validation import check_range
from weft.server.request.vector_inputs import require_task
from weft.server.schemas.chat_completions import ChatCompletionBody
from weft.server.task.structured_output import structure_of
from weft.server.task.task import Chat, OutputWishes, Task
from weft.server.task.tool_use import tool_use


async def chat_task(
    body: ChatCompletionBody,
    request: Request,
    context: ServerContext,
    *,
    sent: BaseModel | None = None,
    refused: Mapping[str, tuple[object, ...]] = REFUSED_IN_CHAT,
    breakpoints: Sequence[Breakpoint] | None = None,
) -> Task:
    """Check every field of a conversation, and build the task.

    Args:
        sent: The body of another API from which `body` was made; its fields are refused or reported, not those of
            `body`.
        refused: Fields that the endpoint refuses; see `ignored_fields`.
        breakpoints: Those of another API's body; None: those of `body`.

    Raises:
        ApiError: A field is wrong, or the model is not served.
    """
    model, workers, size = await context.check_model(request, body.model), context.workers, len(await request.body())
    require_task(model, "generate")
    logprobs = shown_logprobs(body)
    wishes = await workers.run_light(size, _read_wishes, body, model.formats)
    if breakpoints is None:
        breakpoints = find_breakpoints(body.messages, body.prompt_cache_options)
    options = template_options(body, model.tokenizer, wishes.variables)
    messages = await workers.run_light(size, template_messages, body.messages, model.formats.tools)
    return await read_task(
        body,
        request,
        context,
        refused,
        sent=sent,
        input=Chat(messages, options, breakpoints),
        wishes=wishes,
        max_tokens=0 if body.prewarm else _max_tokens(body),
        logprobs=logprobs,
        prompt_logprobs=num_prompt_logprobs(body),
        user=body.safety_identifier or body.user,
    )


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


def shown_logprobs(body: ChatCompletionBody) -> int | None:
    """Number of most probable alternatives per token; None if logprobs were not requested."""
    top_logprobs = check_range("top_logprobs", body.top_logprobs or 0, 0, MAX_LOGPROBS)
    if body.logprobs or body.logprob_token_ids:
        return top_logprobs
    if top_logprobs:
        raise InvalidRequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    return None
