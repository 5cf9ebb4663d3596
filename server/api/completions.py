"""POST /v1/completions: parse, generate, render."""

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Annotated, cast

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.shared.messages import AddRequest, EngineInfo, TokensInput
from weft.engine.shared.sampling_params import SamplingParams
from weft.server.errors import InvalidRequestError
from weft.server.generate.answer import Answer, Order, Prompt
from weft.server.generate.choice_stream import Delta
from weft.server.generate.output_plan import naming_the_grammar, structured_guidance
from weft.server.generate.respond import (
    cache_salt,
    check_context,
    check_token_ids,
    checking_context,
    deadline,
    num_choices,
    open_answer,
    plain_response,
    room,
    stream_response,
    tenant,
)
from weft.server.http.context import ServerContext, TextTokenizer, get_context, system_fingerprint
from weft.server.http.workers import LONG_SIZE
from weft.server.render.common import new_envelope, render_options
from weft.server.render.completions import CompletionRenderer
from weft.server.render.prompt_report import PromptEcho, echo_prompt, num_prompt_logprobs
from weft.server.request.beam_search import beam_options
from weft.server.request.body import BodyRoute
from weft.server.request.cache_options import cache_policy
from weft.server.request.fields import REFUSED_IN_COMPLETIONS, ignored_fields, ignored_header
from weft.server.request.fim import FillIn, fill_in
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
from weft.server.request.structured_output import structure_of
from weft.server.request.truncation import truncated
from weft.server.schemas.completions import CompletionBody

DEFAULT_MAX_TOKENS = 16

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions")
async def create_completion(
    body: CompletionBody, request: Request, context: Annotated[ServerContext, Depends(get_context)]
) -> Response:
    """Continue one prompt or several, streamed or whole."""
    size, workers = len(await request.body()), context.workers
    ignored = await workers.run_light(
        size, ignored_fields, body, REFUSED_IN_COMPLETIONS, strict=context.settings.strict_params
    )
    model = context.check_model(body.model)
    info = context.engine_info
    check_common(body, context.settings.max_n)
    n, best_of = num_choices(body), _best_of(body, context.settings.max_n)
    beams = beam_options(body)
    filling = _filling(body, context)
    max_tokens = _max_tokens(body)
    logprobs = _logprobs(body)
    sampling_params = await workers.run(
        num_to_look_at(body),
        build_sampling_params,
        body,
        max_tokens=max_tokens,
        logprobs=0 if logprobs is None and best_of > n else logprobs,  # ranking needs them
        prompt_logprobs=num_prompt_logprobs(body, logprobs if body.echo else None),
        defaults=context.defaults,
        tokenizer=context.tokenizer,
        info=info,
        seed=secrets.randbits(64),
    )
    if filling is not None:
        ends = (*sampling_params.stop_token_ids, *filling.stop_token_ids)
        sampling_params = msgspec.structs.replace(sampling_params, stop_token_ids=tuple(dict.fromkeys(ends)))
    stops, service = stop_list(body), service_of(request, body, context.settings)
    structure = await workers.run_light(size, structure_of, body)
    prompts = [_fitted(prompt, body, max_tokens, info) for prompt in await _prompts(body, context, info, filling)]
    check_context(prompts, max_tokens, info, "prompt")
    new_request = partial(
        AddRequest,
        num_choices=best_of,
        tenant=tenant(request, body.user),
        priority=service.priority,
        deadline=deadline(request, is_stream=bool(body.stream), ping_s=context.settings.sse_ping_s),
        cache_salt=cache_salt(body.cache_salt, body.prompt_cache_key),
        guidance=structured_guidance(structure),
        caching=cache_policy(body.prompt_cache_options),
        beams=beams,
    )
    all_params = _params_of_each(sampling_params, body, len(prompts))
    requests = [new_request(TokensInput(p.token_ids), params) for p, params in zip(prompts, all_params, strict=True)]
    order = Order(prompts, requests)
    options = render_options(body, logprobs)
    text_options = build_text_options(body, track_tokens=logprobs is not None or options.token_ids)
    skip_special_tokens = body.skip_special_tokens is not False
    echoes = await _echoes(body, prompts, context, skip_special_tokens=skip_special_tokens)
    with naming_the_grammar(structure):
        answer = await open_answer(
            context, request, order, text_options, stops, skip_special_tokens=skip_special_tokens, continues_prompt=True
        )
    envelope = new_envelope("cmpl", model, system_fingerprint(info), service.tier)
    renderer = CompletionRenderer(answer, envelope, options, context.tokenizer, echoes, echo=bool(body.echo))
    headers = ignored_header(ignored)
    if body.stream:
        return stream_response(answer, renderer, headers, context)

    def render(deltas: list[Delta]) -> bytes:
        return renderer.whole([(index, deltas[index]) for index in _best(answer, n)])

    return await plain_response(answer, render, headers)


def _max_tokens(body: CompletionBody) -> int:
    if body.prewarm:
        return 0
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return check_range("max_tokens", max_tokens, 0 if body.echo else 1, None)


def _logprobs(body: CompletionBody) -> int | None:
    """Most probable alternatives per token; None when logprobs are not asked for."""
    if body.logprobs is None:
        return 0 if body.logprob_token_ids else None
    return check_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)


def _filling(body: CompletionBody, context: ServerContext) -> FillIn | None:
    """How to ask for what stands before the suffix; None when there is none."""
    if not body.suffix:
        return None
    if body.echo:
        raise InvalidRequestError("echo cannot be used with suffix", param="echo")
    return fill_in(context.tokenizer)


def _fitted(prompt: Prompt, body: CompletionBody, max_tokens: int, info: EngineInfo) -> Prompt:
    token_ids = truncated(prompt.token_ids, body.truncate_prompt_tokens, max_tokens, info)
    return Prompt(token_ids, prompt.text if len(token_ids) == len(prompt.token_ids) else None)


def _params_of_each(params: SamplingParams, body: CompletionBody, num_prompts: int) -> list[SamplingParams]:
    """The parameters of each prompt: without a seed of the caller's, equal prompts are answered differently."""
    if body.seed is not None:
        return [params] * num_prompts
    return [msgspec.structs.replace(params, seed=secrets.randbits(64)) for _ in range(num_prompts)]


def _best_of(body: CompletionBody, max_n: int) -> int:
    """How many choices the engine makes for each prompt."""
    n = num_choices(body)
    if body.best_of is None:
        return n
    check_range("best_of", body.best_of, n, max_n)
    if body.stream and body.best_of > n:
        raise InvalidRequestError("best_of cannot be used with stream: the best is known at the end", param="best_of")
    return body.best_of


def _best(answer: Answer, n: int) -> list[int]:
    """The choices to show: of each prompt, the n with the highest mean log-probability, or all as they are."""
    num_made = answer.order.requests[0].num_choices
    shown: list[int] = []
    for first in range(0, len(answer.choices), num_made):
        made = range(first, first + num_made)
        shown += sorted(made, key=lambda i: -answer.choices[i].mean_logprob)[:n] if n < num_made else made
    return shown


async def _prompts(
    body: CompletionBody, context: ServerContext, info: EngineInfo, filling: FillIn | None
) -> list[Prompt]:
    """Every prompt as token ids. One that is absent is the beginning-of-text token, or what stands for it."""
    if body.prompt is None:
        begin = context.tokenizer.bos_token_id
        stand_in = list(info.eos_token_ids[:1]) if filling is None else []
        prompts = [Prompt([begin] if begin is not None else stand_in)]
    else:
        named = _named_prompts(body.prompt)
        # More would never find room in the queue; refused before work is spent on them.
        check_range("the number of prompts", len(named), 0, context.settings.max_num_waiting, param="prompt")
        num_chars = min(sum(len(item) for _, item in named), LONG_SIZE - 1)  # many short ones take their time, too
        prompts = [await _prompt(item, name, num_chars, body, context, info) for name, item in named]
    if filling is not None:
        suffix, of_use = body.suffix or "", room(body.truncate_prompt_tokens, info)
        with checking_context(_max_tokens(body), info, "suffix"):
            suffix_ids = await context.workers.run(len(suffix), context.tokenizer.encode_continuation, suffix, of_use)
        prompts = [_filled(prompt, suffix_ids, filling, context.tokenizer) for prompt in prompts]
    if not prompts or not all(prompt.token_ids for prompt in prompts):
        raise InvalidRequestError("prompt must hold at least one token, got none", param="prompt")
    return prompts


def _named_prompts(prompt: str | Sequence[str | int | list[int]]) -> list[tuple[str, str | list[int]]]:
    """Each prompt with its place in the body. A list of numbers is one prompt."""
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if prompt and isinstance(prompt[0], int):
        return [("prompt", cast(list[int], prompt))]
    return [(f"prompt[{i}]", item) for i, item in enumerate(cast(Sequence[str | list[int]], prompt))]


async def _prompt(
    item: str | list[int], name: str, num_chars: int, body: CompletionBody, context: ServerContext, info: EngineInfo
) -> Prompt:
    if isinstance(item, str):
        size, with_special = max(num_chars, len(item)), body.add_special_tokens is not False
        of_use = room(body.truncate_prompt_tokens, info)
        with checking_context(_max_tokens(body), info, "prompt"):
            return Prompt(await context.workers.run(size, context.tokenizer.encode, item, with_special, of_use), item)
    if body.truncate_prompt_tokens is None:  # before each id is looked at
        check_context([Prompt(item)], _max_tokens(body), info, "prompt")
    await context.workers.run_light(len(item), check_token_ids, item, info, name)
    return Prompt(item)


def _filled(prompt: Prompt, suffix_ids: list[int], filling: FillIn, tokenizer: TextTokenizer) -> Prompt:
    """The prompt for filling in; the beginning-of-text token, where there is one, stays in front."""
    has_begin = bool(prompt.token_ids) and prompt.token_ids[0] == tokenizer.bos_token_id
    begin, prefix_ids = prompt.token_ids[:has_begin], prompt.token_ids[has_begin:]
    return Prompt([*begin, *filling.prompt(prefix_ids, suffix_ids)])


async def _echoes(
    body: CompletionBody, prompts: list[Prompt], context: ServerContext, *, skip_special_tokens: bool
) -> list[PromptEcho] | None:
    if not body.echo and _logprobs(body) is None:
        return None
    return [
        await context.workers.run(
            len(p.token_ids), echo_prompt, p, context.tokenizer, skip_special_tokens=skip_special_tokens
        )
        for p in prompts
    ]
