"""POST /v1/chat/completions: parse, generate, render."""

import secrets
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.shared.messages import AddRequest, EngineInfo, Pin, TokensInput
from weft.server.errors import InvalidRequestError
from weft.server.generate.answer import Order, Prompt
from weft.server.generate.output_plan import OutputWishes, naming_the_grammar, plan_output, read_wishes
from weft.server.generate.respond import (
    cache_salt,
    check_context,
    checking_context,
    deadline,
    num_choices,
    open_answer,
    plain_response,
    room,
    stream_response,
    tenant,
)
from weft.server.http.context import ServerContext, get_context, system_fingerprint
from weft.server.render.chat import ChatRenderer
from weft.server.render.common import new_envelope, render_options
from weft.server.render.prompt_report import num_prompt_logprobs
from weft.server.request.beam_search import beam_options
from weft.server.request.body import BodyRoute
from weft.server.request.cache_options import cache_policy, find_breakpoints, find_pins
from weft.server.request.fields import REFUSED_IN_CHAT, ignored_fields, ignored_header
from weft.server.request.messages import template_messages, text_of
from weft.server.request.params import (
    MAX_LOGPROBS,
    build_sampling_params,
    build_text_options,
    check_common,
    check_range,
    num_to_look_at,
    stop_list,
)
from weft.server.request.service_tier import service_of
from weft.server.request.template_options import TemplateOptions, honoured_by_template, template_options
from weft.server.request.truncation import truncated
from weft.server.schemas.chat_completions import ChatCompletionBody, Message
from weft.server.text.chat_template import ChatTemplateError
from weft.server.text.long_text import Room

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(
    body: ChatCompletionBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Answer a conversation, streamed or whole."""
    honoured, size, workers = honoured_by_template(context.tokenizer), len(await request.body()), context.workers
    ignored = await workers.run_light(
        size, ignored_fields, body, REFUSED_IN_CHAT, strict=context.settings.strict_params, honoured=honoured
    )
    model = context.check_model(body.model)
    info = context.engine_info
    check_common(body, context.settings.max_n)
    beams = beam_options(body)
    max_tokens = 0 if body.prewarm else _max_tokens(body)
    logprobs = _logprobs(body)
    sampling_params = await workers.run(
        num_to_look_at(body),
        build_sampling_params,
        body,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=num_prompt_logprobs(body),
        defaults=context.defaults,
        tokenizer=context.tokenizer,
        info=info,
        seed=secrets.randbits(64),
    )
    stops, service = stop_list(body), service_of(request, body, context.settings)
    wishes = await workers.run_light(size, read_wishes, body, context.formats)
    prompt, pins = await _prompt(body, context, wishes, max_tokens, info, size)
    prediction = await _prediction(body, context, info)
    plan = await workers.run_light(
        size, plan_output, wishes, context.formats, context.tokenizer, prompt.token_ids, prediction
    )
    engine_request = AddRequest(
        TokensInput(prompt.token_ids),
        sampling_params,
        num_choices=num_choices(body),
        tenant=tenant(request, body.safety_identifier, body.user),
        priority=service.priority,
        deadline=deadline(request, is_stream=bool(body.stream), ping_s=context.settings.sse_ping_s),
        cache_salt=cache_salt(body.cache_salt, body.prompt_cache_key),
        guidance=plan.guidance,
        caching=cache_policy(body.prompt_cache_options, pins),
        beams=beams,
    )
    order = Order([prompt], [engine_request])
    options = render_options(body, logprobs)
    text_options = build_text_options(
        body, track_tokens=logprobs is not None or options.token_ids or plan.counts_tokens
    )
    with naming_the_grammar(wishes.structure, wishes.use):
        answer = await open_answer(
            context,
            request,
            order,
            text_options,
            stops,
            skip_special_tokens=body.skip_special_tokens is not False,
            continues_prompt=bool(body.continue_final_message),
            kept_ids=plan.kept_ids,
            new_parser=plan.reading.new_parser if plan.reading else None,
        )
    envelope = new_envelope("chatcmpl", model, system_fingerprint(info), service.tier)
    renderer = ChatRenderer(answer, envelope, options, context.tokenizer, plan.reading)
    headers = ignored_header([*ignored, *wishes.thinking.ignored])
    if body.stream:
        return stream_response(answer, renderer, headers, context)
    return await plain_response(answer, renderer.whole, headers)


async def encode_messages(
    context: ServerContext, messages: list[Message], *, options: TemplateOptions, room: Room, size: int
) -> list[int]:
    """Messages to prompt ids; `size` is that of the body.

    Raises:
        InvalidRequestError: The messages do not suit the template, or there is none.
        TextTooLongError: There is no room for the prompt.
    """

    def encode() -> list[int]:
        return context.tokenizer.encode_chat(
            template_messages(messages),
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            template_kwargs=options.variables,
            room=room,
        )

    try:
        return await context.workers.run(size, encode)
    except ChatTemplateError as exc:
        raise InvalidRequestError(str(exc), param="messages") from exc
    except RecursionError as exc:  # arguments of a call are JSON inside JSON, which the body's own parser did not see
        raise InvalidRequestError("messages are nested too deeply", param="messages") from exc


async def _prompt(
    body: ChatCompletionBody,
    context: ServerContext,
    wishes: OutputWishes,
    max_tokens: int | None,
    info: EngineInfo,
    size: int,
) -> tuple[Prompt, list[Pin]]:
    """The prompt, and which beginnings of it are to stay in the prefix cache."""
    breakpoints = find_breakpoints(body.messages, body.prompt_cache_options)
    options = template_options(body, context.tokenizer, wishes.variables)
    of_use = room(body.truncate_prompt_tokens, info)
    encode = partial(encode_messages, context, options=options, room=of_use, size=size)
    with checking_context(max_tokens, info, "messages"):
        whole = await encode(body.messages)
        prompt = Prompt(truncated(whole, body.truncate_prompt_tokens, max_tokens, info))
        check_context([prompt], max_tokens, info, "messages")
        return prompt, await find_pins(body.messages, breakpoints, whole, encode, len(whole) - len(prompt.token_ids))


async def _prediction(body: ChatCompletionBody, context: ServerContext, info: EngineInfo) -> tuple[int, ...]:
    if body.prediction is None:
        return ()
    text = text_of(body.prediction.content, "prediction.content", "")
    with checking_context(None, info, "prediction.content"):
        return tuple(await context.workers.run(len(text), context.tokenizer.encode, text, False, room(None, info)))


def _max_tokens(body: ChatCompletionBody) -> int | None:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(body, name)
    if max_tokens is not None:
        check_range(name, max_tokens, 1, None)
    return max_tokens


def _logprobs(body: ChatCompletionBody) -> int | None:
    """Most probable alternatives per token; None when logprobs are not asked for."""
    top_logprobs = check_range("top_logprobs", body.top_logprobs or 0, 0, MAX_LOGPROBS)
    if body.logprobs or body.logprob_token_ids:
        return top_logprobs
    if top_logprobs:
        raise InvalidRequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    return None
