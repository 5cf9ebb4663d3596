"""Builds the task from the fields that OpenAI's generating endpoints share."""

from collections.abc import Collection, Mapping

from pydantic import BaseModel
from starlette.requests import Request

from weft.server.http.auth import digest, tenant_of
from weft.server.http.context import ServerContext
from weft.server.request.beam_search import beam_options
from weft.server.request.cache_options import uses_cache
from weft.server.request.deadline import deadline_of
from weft.server.request.fields import ACCEPTED, ignored_fields
from weft.server.request.kv_transfer import salt_of, stores_prompt
from weft.server.request.params import build_sampling_params, build_text_options, check_common, num_to_look_at
from weft.server.request.service_tier import service_of
from weft.server.request.template_options import honoured_by_template
from weft.server.request.vector_inputs import require_task
from weft.server.schemas.common import GenerationBody
from weft.server.task.task import Chat, OutputWishes, Task, Texts


async def read_task(
    body: GenerationBody,
    request: Request,
    context: ServerContext,
    refused: Mapping[str, tuple[object, ...]],
    *,
    sent: BaseModel | None = None,
    input: Chat | Texts,
    wishes: OutputWishes,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    num_made: int | None = None,
    user: str | None,
    accepted: Collection[str] = ACCEPTED,
) -> Task:
    """Read the fields that both endpoints have, and build the task.

    Args:
        refused: Fields that the endpoint refuses, and `accepted`, which it ignores; see `ignored_fields`.
        sent: The body of another API from which `body` was made, whose fields are looked at for that.
        logprobs: Number of alternatives per token that the answer shows; None: it shows no logprobs.
        num_made: Number of choices to generate, of which the best are returned; None: all are returned.
        user: The end user that the caller names; None: none is named.

    Raises:
        InvalidRequestError: A field is out of range or cannot be used with another one, or the model makes no text.
    """
    model, settings, size = await context.check_model(request, body.model), context.settings, len(await request.body())
    require_task(model, "generate")
    ignored = await context.workers.run_light(
        size, ignored_fields, sent or body, refused, strict=settings.strict_params, accepted=accepted
    )
    honoured = honoured_by_template(model.tokenizer) if isinstance(input, Chat) else ()
    check_common(body, settings.max_n)
    n, beams = 1 if body.n is None else body.n, beam_options(body)
    ranks = num_made is not None and num_made > n
    filling = input.filling if isinstance(input, Texts) else None
    sampling = await context.workers.run(
        num_to_look_at(body),
        build_sampling_params,
        body,
        model,
        max_tokens=max_tokens,
        logprobs=0 if logprobs is None and ranks else logprobs,
        prompt_logprobs=prompt_logprobs,
        extra_stop_ids=filling.stop_token_ids if filling else (),
    )
    return Task(
        size=size,
        model=model,
        name=body.model or model.name,
        input=input,
        sampling=sampling,
        has_seed=body.seed is not None,
        num_choices=n,
        num_made=num_made or n,
        beams=beams,
        text=build_text_options(body, shows_logprobs=logprobs is not None),
        wishes=wishes,
        truncate_to=body.truncate_prompt_tokens,
        service=service_of(request, body, settings),
        tenant=tenant_of(request) or (digest(user) if user else ""),
        deadline=deadline_of(request, is_stream=bool(body.stream), ping_s=settings.sse_ping_s),
        cache_salt=salt_of(body),
        uses_cache=uses_cache(body.prompt_cache_options),
        stores_prompt=stores_prompt(body, model.engine_info),
        is_stream=bool(body.stream),
        ignored=[*(name for name in ignored if name not in honoured), *wishes.thinking.ignored],
    )
