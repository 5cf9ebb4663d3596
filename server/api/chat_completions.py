"""POST /v1/chat/completions: parse, generate, render."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Final

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from server.answer import Order, Prompt
from server.chat_template import ChatTemplateError
from server.context import ServerContext, get_context, system_fingerprint
from server.errors import InvalidRequestError
from server.fields import REFUSED_IN_CHAT, ignored_fields, ignored_header
from server.messages import template_messages, text_of
from server.output_plan import naming_the_grammar, plan_output
from server.params import MAX_LOGPROBS, build_sampling_params, build_text_options, check_common, check_range, stop_list
from server.render import new_envelope, render_options
from server.render_chat import ChatRenderer
from server.respond import (
    cache_salt,
    check_context,
    deadline,
    num_choices,
    off_loop,
    open_answer,
    plain_response,
    stream_response,
    tenant,
)
from server.schemas.chat_completions import ChatCompletionBody, Message
from server.structured_output import structure_of
from server.thinking import read_thinking
from server.tool_use import ToolUse, tool_use

NUM_TAIL_TOKENS = 32
"""Of a prompt's end, where templates open or close reasoning."""

NO_VARIABLES: Final[Mapping[str, object]] = {}

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(
    body: ChatCompletionBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Answer a conversation, streamed or whole."""
    ignored = ignored_fields(body, REFUSED_IN_CHAT, strict=context.settings.strict_params)
    model = context.check_model(body.model)
    info = context.engine_info
    check_common(body, context.settings.max_n)
    max_tokens = _max_tokens(body)
    logprobs = _logprobs(body)
    sampling_params = await off_loop(
        sum(map(len, body.bad_words or ())),  # which are encoded
        build_sampling_params,
        body,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=None,
        defaults=context.defaults,
        tokenizer=context.tokenizer,
        info=info,
        seed=secrets.randbits(64),
    )
    stops = stop_list(body)
    use, structure, thinking = tool_use(body), structure_of(body), read_thinking(body, context.formats)
    variables = {**thinking.template_kwargs, **(body.chat_template_kwargs or {})}
    prompt = Prompt(await encode_messages(context, body.messages, use=use, variables=variables))
    check_context([prompt], max_tokens, info, "messages")
    plan = plan_output(
        context.formats,
        context.tokenizer,
        use=use,
        structure=structure,
        thinking=thinking,
        prompt_tail=context.tokenizer.decode(prompt.token_ids[-NUM_TAIL_TOKENS:], skip_special_tokens=False),
        prediction_token_ids=await _prediction(body, context),
    )
    order = Order(
        [prompt],
        sampling_params,
        num_choices=num_choices(body),
        tenant=tenant(request, body.safety_identifier, body.user),
        priority=body.priority or 0,
        deadline=deadline(request, is_stream=bool(body.stream), ping_s=context.settings.sse_ping_s),
        cache_salt=cache_salt(body.cache_salt, body.prompt_cache_key),
        guidance=plan.guidance,
    )
    options = render_options(body, logprobs)
    text_options = build_text_options(
        body, track_tokens=logprobs is not None or options.token_ids or plan.counts_tokens
    )
    with naming_the_grammar(structure, use):
        answer = await open_answer(
            context,
            request,
            order,
            text_options,
            stops,
            skip_special_tokens=body.skip_special_tokens is not False,
            kept_ids=plan.kept_ids,
        )
    envelope = new_envelope("chatcmpl", model, system_fingerprint(info))
    renderer = ChatRenderer(answer, envelope, options, context.tokenizer, plan.reading)
    headers = ignored_header([*ignored, *thinking.ignored])
    if body.stream:
        return stream_response(answer, renderer, headers, context)
    return await plain_response(request, answer, renderer.whole, headers)


async def encode_messages(
    context: ServerContext,
    messages: list[Message],
    *,
    use: ToolUse | None = None,
    variables: Mapping[str, object] = NO_VARIABLES,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Messages to prompt ids; variables are for the template, which is shown the tools as well.

    Raises:
        InvalidRequestError: The messages do not suit the template, or there is none.
    """
    template_kwargs = {**variables, "tools": use.shown} if use else variables
    try:
        plain = template_messages(messages)
        num_chars = len(repr((plain, template_kwargs)))  # not of contents alone: calls and tools take their time, too
        return await off_loop(
            num_chars,
            context.tokenizer.encode_chat,
            plain,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
    except ChatTemplateError as exc:
        raise InvalidRequestError(str(exc), param="messages") from exc
    except RecursionError as exc:  # arguments of a call are JSON inside JSON, which the body's own parser did not see
        raise InvalidRequestError("messages are nested too deeply", param="messages") from exc


async def _prediction(body: ChatCompletionBody, context: ServerContext) -> tuple[int, ...]:
    if body.prediction is None:
        return ()
    text = text_of(body.prediction.content, "prediction.content")
    return tuple(await off_loop(len(text), context.tokenizer.encode, text, add_special_tokens=False))


def _max_tokens(body: ChatCompletionBody) -> int | None:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(body, name)
    if max_tokens is not None:
        check_range(name, max_tokens, 1, None)
    return max_tokens


def _logprobs(body: ChatCompletionBody) -> int | None:
    """Alternatives per token; None when logprobs are not asked for."""
    top_logprobs = check_range("top_logprobs", body.top_logprobs or 0, 0, MAX_LOGPROBS)
    if body.logprobs:
        return top_logprobs
    if top_logprobs:
        raise InvalidRequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    return None
