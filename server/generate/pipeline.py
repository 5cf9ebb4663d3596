"""The generation pipeline: turns a task of any API into an HTTP response, or into the answer that is a part of one.

    task -> prompts -> output plan -> engine requests -> choices -> events -> the API's renderer -> response

Acceptance happens here. Until the engine has accepted every prompt, failures are ordinary HTTP errors. After that, the
answer has exactly one reader, which closes it, even if the client disconnects before the first byte.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.wire.inputs import EncoderInput, TokensInput
from weft.engine.wire.messages import AddRequest, CachePolicy, Guidance, Pin
from weft.server.generate.answer import Answer
from weft.server.generate.choice_stream import ChoiceStream
from weft.server.generate.events import Renderer, Report, WholeChoice
from weft.server.generate.output_plan import OutputPlan, ParsedChoice, plan_output
from weft.server.generate.prompts import PromptEncoder
from weft.server.generate.repair import named, open_loosening
from weft.server.http.context import ServerContext
from weft.server.http.metrics import RequestTimer
from weft.server.http.sse import DATA_ONLY, EventStream, Framing
from weft.server.task.task import Chat, OutputWishes, Prompt, Task, Texts
from weft.server.task.validation import ignored_header, renamed

NUM_PRIMING_IDS = 8
"""Number of a prompt's last ids that a detokenizer reads first, to continue the text. Exceeds a character's bytes."""

NewRenderer = Callable[[Report], Renderer]


async def respond(
    task: Task, request: Request, context: ServerContext, new_renderer: NewRenderer, framing: Framing = DATA_ONLY
) -> Response:
    """Generate the answer to a task, streamed or whole.

    Raises:
        ApiError: A prompt does not fit, or the engine rejected it. For a whole answer, also if generation failed.
    """
    answer, renderer = await open_answer(task, request, context, new_renderer)
    headers = ignored_header([*task.ignored, *(renamed(path, task.names) for path in answer.lost)])
    if task.is_stream:
        return EventStream(
            answer.rendered(renderer.stream),
            renderer.stream_end,
            renderer.stream_error,
            headers=headers,
            ping_s=context.settings.sse_ping_s,
            close=answer.close,
            framing=framing,
        )
    try:
        choices = await answer.whole(task.num_choices)
    finally:
        answer.close()  # also if this task is cancelled
    return Response(renderer.whole(choices), headers=headers, media_type="application/json")


async def complete(task: Task, request: Request, context: ServerContext) -> tuple[list[WholeChoice], Report]:
    """Generate the whole answer to a task that is one part of a response, such as one question of several.

    Raises:
        ApiError: As `respond`.
    """
    _, answer = await new_answer(task, request, context)
    await accepted(answer, task, context)
    try:
        return await answer.whole(task.num_choices), answer
    finally:
        answer.close()


async def open_answer(
    task: Task, request: Request, context: ServerContext, new_renderer: NewRenderer
) -> tuple[Answer, Renderer]:
    """An answer that the engine has accepted, and its renderer. The caller closes the answer."""
    context.metrics.of(task.model.name).note_retry(request.headers.get("x-stainless-retry-count", ""))
    prompts, answer = await new_answer(task, request, context)
    # A renderer may decode the prompts of texts, to echo them.
    size = sum(len(prompt.token_ids) for prompt in prompts) if isinstance(task.input, Texts) else 0
    renderer = await context.workers.run(size, new_renderer, answer)
    await accepted(answer, task, context)
    return answer, renderer


async def accepted(answer: Answer, task: Task, context: ServerContext) -> None:
    """Wait until the engine has accepted a new answer.

    Raises:
        ApiError: It rejected a prompt, or nothing that it can follow is left of the grammar.
    """
    prompt, prediction = answer.prompts[0].prompt, answer.guidance.prediction_token_ids
    answer.named = partial(named, wishes=task.wishes, names=task.names)

    def guide(wishes: OutputWishes) -> Guidance:
        return plan_output(replace(task, wishes=wishes), prompt.token_ids, prediction).guidance

    guided = partial(context.workers.run_light, task.size, guide)
    await open_loosening(answer, task.model.engine_client, task.wishes, guided)


async def new_answer(task: Task, request: Request, context: ServerContext) -> tuple[list[Prompt], Answer]:
    """Prepare everything that is sent to the engine; sends nothing yet."""
    encoder, workers = PromptEncoder(task, context.workers), context.workers
    prompts, pins = await encoder.prompts()
    prediction = await encoder.prediction()
    plan = await workers.run_light(task.size, plan_output, task, prompts[0].token_ids, prediction)
    requests = [_engine_request(task, prompt, plan, pins) for prompt in prompts]
    choices = [_new_choice(task, prompt, plan) for prompt in prompts for _ in range(task.num_made)]
    metrics = context.metrics.of(task.model.name)
    timer = RequestTimer(metrics, request.state.arrival_time, len(choices))
    has_cache = context.settings.prefix_caching and requests[0].caching.is_used
    block_size = task.model.engine_info.block_size if has_cache else 0
    return prompts, Answer(prompts, requests, choices, timer, block_size)


def _engine_request(task: Task, prompt: Prompt, plan: OutputPlan, pins: list[Pin]) -> AddRequest:
    params, begin = task.sampling, task.encoded.begin
    if not (task.has_seed or isinstance(task.input, Chat)):  # so that equal prompts of a list get different answers
        params = msgspec.structs.replace(params, seed=secrets.randbits(64))
    if task.fits_context and params.max_tokens is not None:
        room = task.model.engine_info.room(len(prompt.token_ids), len(begin))
        max_tokens, min_tokens = min(params.max_tokens, room), min(params.min_tokens, room)
        params = msgspec.structs.replace(params, max_tokens=max_tokens, min_tokens=min_tokens)
    return AddRequest(
        EncoderInput(prompt.token_ids, list(begin))
        if begin
        else TokensInput(prompt.token_ids, spans=[*prompt.spans], pictures=[*prompt.pictures]),
        params,
        num_choices=task.num_made,
        tenant=task.tenant,
        priority=task.service.priority,
        deadline=task.deadline,
        cache_salt=task.cache_salt,
        adapter=task.model.adapter,
        guidance=plan.guidance,
        caching=CachePolicy(task.uses_cache or bool(pins), task.stores_prompt, tuple(pins)),
        beams=task.beams,
    )


def _new_choice(task: Task, prompt: Prompt, plan: OutputPlan) -> ChoiceStream:
    options = task.text
    detokenizer = task.model.tokenizer.detokenizer(options.skip_special_tokens, plan.kept_ids)
    if task.continues_prompt:  # or some vocabularies would drop the leading space
        for token_id in prompt.token_ids[-NUM_PRIMING_IDS:]:
            detokenizer.feed(token_id)
    if plan.new_parser is None:
        return ChoiceStream(detokenizer, options)
    tracks_tokens = options.tracks_tokens or plan.counts_tokens or bool(options.stops)
    options = replace(options, tracks_tokens=tracks_tokens)
    return ChoiceStream(detokenizer, options, ParsedChoice(plan.new_parser(), options, is_whole=not task.is_stream))
