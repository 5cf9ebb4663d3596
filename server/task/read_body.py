"""Builds the task of a request from the fields that OpenAI's generating endpoints share.

Body fields become sampling parameters for the engine and text options for the pipeline. `SamplingParams` checks the
ranges that the engine owns. This file checks the rest: limits that depend on the vocabulary, and limits on text. It
also names fields as they are called on the wire.
"""

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from weft.engine.wire.messages import EngineInfo
from weft.engine.wire.params import SamplingParams
from weft.server.errors import InvalidRequestError, shown
from weft.server.http.auth import digest, tenant_of
from weft.server.http.context import ServerContext
from weft.server.models.seq2seq import NOT_ENCODED, Encoded
from weft.server.models.served_model import ServedModel
from weft.server.task import request_options
from weft.server.task.schema import GenerationBody
from weft.server.task.task import Chat, OutputWishes, Task, TextOptions, Texts
from weft.server.task.template_options import honoured_by_template
from weft.server.task.validation import ACCEPTED, check_range, ignored_fields, require_task
from weft.server.text.text_tokenizer import TextTokenizer

MAX_STOPS = 64
MAX_BAD_WORDS = 1024
MAX_STOP_CHARS = 1024
"""Most characters in a stop string or a bad word."""
MAX_LOGPROBS = 20

T = TypeVar("T")


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
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    num_made: int | None = None,
    user: str | None = None,
    accepted: Collection[str] = ACCEPTED,
) -> Task:
    """Read the fields that both endpoints have, and build the task.

    Args:
        refused: Fields that the endpoint refuses, and `accepted`, which it ignores; see `ignored_fields`.
        sent: The body of another API from which `body` was made, whose fields are looked at for that.
        logprobs: Number of alternatives per token that the answer shows; None: it shows no logprobs.
        num_made: Number of choices to generate, of which the best are returned; None: all are returned.

    Raises:
        InvalidRequestError: A field is out of range or cannot be used with another one, or the model makes no text.
    """
    model, settings, size = await context.check_model(request, body.model), context.settings, len(await request.body())
    require_task(model, "generate")
    ignored = await context.workers.run_light(
        size, ignored_fields, sent or body, refused, strict=settings.strict_params, accepted=accepted
    )
    honoured = honoured_by_template(model.tokenizer) if isinstance(input, Chat) else ()
    request_options.check_common(body, settings.max_n)
    n, encoded = body.n or 1, request_options.read_encoded(body, model, may_search=not (wishes.structure or num_made))
    sampling = await context.workers.run(
        num_to_look_at(body),
        build_sampling_params,
        body,
        model,
        max_tokens=encoded.max_tokens if max_tokens is None else max_tokens,
        logprobs=0 if logprobs is None and (num_made or n) > n else logprobs,
        prompt_logprobs=prompt_logprobs,
        extra_stop_ids=input.filling.stop_token_ids if isinstance(input, Texts) and input.filling else (),
        encoded=encoded,
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
        beams=request_options.beam_options(body) or encoded.beams,
        text=build_text_options(body, shows_logprobs=logprobs is not None),
        wishes=wishes,
        truncate_to=body.truncate_prompt_tokens,
        service=request_options.service_of(request, body, settings),
        tenant=tenant_of(request) or (digest(user) if user else ""),
        deadline=request_options.deadline_of(request, is_stream=bool(body.stream), ping_s=settings.sse_ping_s),
        cache_salt=request_options.salt_of(body),
        uses_cache=request_options.uses_cache(body.prompt_cache_options),
        stores_prompt=request_options.stores_prompt(body, model.engine_info),
        encoded=encoded,
        fits_context=not settings.strict_params,
        is_stream=bool(body.stream),
        ignored=[*wishes.left_out, *(n for n in ignored if n not in honoured), *wishes.thinking.ignored, *wishes.lost],
    )


def build_sampling_params(
    body: GenerationBody,
    model: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    extra_stop_ids: Sequence[int] = (),
    encoded: Encoded = NOT_ENCODED,
) -> SamplingParams:
    """The sampling parameters of a request. The seed is random if the body has none.

    Raises:
        InvalidRequestError: A value is out of range. The error has the field's name on the wire.
    """
    info, defaults = model.engine_info, model.defaults
    allowed = _known_ids("allowed_token_ids", body.allowed_token_ids, info)
    stops = _known_ids("stop_token_ids", body.stop_token_ids, info)
    top_k = _first(body.top_k, defaults.top_k, 0)
    least = encoded.min_tokens if max_tokens is None else min(encoded.min_tokens, max_tokens)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=check_range("min_tokens", _first(body.min_tokens, least), 0, info.max_model_len),
            temperature=_first(body.temperature, defaults.temperature, 1.0),
            top_k=0 if top_k == -1 else min(top_k, info.vocab_size),  # other servers use -1 for all
            top_p=_first(body.top_p, defaults.top_p, 1.0),
            min_p=_first(body.min_p, defaults.min_p, 0.0),
            presence_penalty=_first(body.presence_penalty, 0.0),
            frequency_penalty=_first(body.frequency_penalty, 0.0),
            repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
            no_repeat_ngram_size=_first(body.no_repeat_ngram_size, encoded.stated.no_repeat_ngram_size),
            encoder_no_repeat_ngram_size=encoded.stated.encoder_no_repeat_ngram_size,
            begin_bans=encoded.stated.begin_bans,
            forced_end_id=encoded.stated.forced_end_id,
            renormalizes=encoded.stated.renormalizes,
            seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
            stop_token_ids=tuple(dict.fromkeys((*stops, *extra_stop_ids))),
            ignore_eos=bool(body.ignore_eos),
            logit_bias=_logit_bias(body.logit_bias or {}, info),
            bad_words_token_ids=(*_bad_words(body.bad_words or [], model.tokenizer), *encoded.stated.banned),
            allowed_token_ids=None if body.allowed_token_ids is None else tuple(dict.fromkeys(allowed)),
            logprobs=logprobs,
            logprob_token_ids=tuple(_known_ids("logprob_token_ids", body.logprob_token_ids, info)),
            prompt_logprobs=prompt_logprobs,
        )
    except ValueError as exc:
        raise InvalidRequestError(str(exc), param=str(exc).split()[0]) from None


def num_to_look_at(body: GenerationBody) -> int:
    """Size of the work in `build_sampling_params`: characters to encode plus ids to check."""
    return sum(map(len, body.bad_words or ())) + len(body.allowed_token_ids or ())


def num_prompt_logprobs(body: GenerationBody, echoed: int | None = None) -> int | None:
    """Number of alternatives per prompt token, the maximum of the field and `echoed`; None if neither is given.

    Raises:
        InvalidRequestError: The field is out of range, or the answer is a stream, which has no place for them.
    """
    if body.prompt_logprobs is None:
        return echoed
    if body.stream:
        raise InvalidRequestError("prompt_logprobs cannot be used with stream", param="prompt_logprobs")
    return max(check_range("prompt_logprobs", body.prompt_logprobs, 0, MAX_LOGPROBS), echoed or 0)


def _first(*values: T | None) -> T:
    """The first value that is not None. The last one must not be None."""
    return next(value for value in values if value is not None)


def _known_ids(name: str, token_ids: list[int] | None, info: EngineInfo) -> list[int]:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < info.vocab_size:
        for i, token_id in enumerate(token_ids):
            check_range(f"{name}[{i}]", token_id, 0, info.vocab_size - 1)
    return token_ids or []


def _logit_bias(logit_bias: dict[str, float], info: EngineInfo) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in logit_bias.items():
        if not re.fullmatch("[0-9]{1,9}", key) or int(key) >= info.vocab_size:
            bound = f"token ids between 0 and {info.vocab_size - 1}"
            message = f"logit_bias must have keys that are {bound}, got {shown(key)}"
            raise InvalidRequestError(message, param="logit_bias")
        bias[int(key)] = value
    return bias


def _bad_words(words: list[str], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    check_range("the number of bad_words", len(words), 0, MAX_BAD_WORDS, param="bad_words")
    for i, word in enumerate(words):
        if not word.strip():
            raise InvalidRequestError("bad_words must not hold an empty word", param=f"bad_words[{i}]")
        check_range(f"the length of bad_words[{i}]", len(word), 1, MAX_STOP_CHARS, param=f"bad_words[{i}]")
    return tuple(ids for word in words for ids in tokenizer.bad_word_ids(word))


def build_text_options(body: GenerationBody, *, shows_logprobs: bool) -> TextOptions:
    """The options that control how output becomes text.

    Raises:
        InvalidRequestError: A stop string is empty or too long, or there are too many.
    """
    return TextOptions(
        stops=_stop_list(body),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        include_stop=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
        skip_special_tokens=body.skip_special_tokens is not False,
        tracks_tokens=shows_logprobs or bool(body.return_token_ids),
        tells_ids=bool(body.return_token_ids),
    )


def _stop_list(body: GenerationBody) -> list[str]:
    """The stop strings as a list; a body may also give a single string."""
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"stop must hold at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
    for i, stop in enumerate(stops):
        if not stop:
            param = "stop" if isinstance(body.stop, str) else f"stop[{i}]"
            raise InvalidRequestError(f"{param} must not be empty", param=param)
        check_range(f"the length of stop[{i}]", len(stop), 1, MAX_STOP_CHARS, param="stop")
    return stops
