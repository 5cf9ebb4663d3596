"""From the fields of a body to what the engine and the text pipeline are told.

Ranges that the engine owns are checked by `SamplingParams`; here are only those that concern the wire: the names of
its fields, what depends on the vocabulary, and what is text.
"""

import re
from typing import TypeVar

from weft.engine.shared.messages import EngineInfo
from weft.engine.shared.sampling_params import SamplingParams
from weft.server.errors import InvalidRequestError
from weft.server.generate.choice_stream import TextOptions
from weft.server.http.context import TextTokenizer
from weft.server.request.generation_defaults import GenerationDefaults
from weft.server.request.validation import shown
from weft.server.schemas.common import GenerationBody

MAX_STOPS = 64
MAX_BAD_WORDS = 1024
MAX_STOP_CHARS = 1024
"""Of a stop string, and of a bad word."""
MAX_LOGPROBS = 20
_MAX_PRIORITY = 2**31 - 1

T = TypeVar("T")


def build_sampling_params(
    body: GenerationBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    defaults: GenerationDefaults,
    tokenizer: TextTokenizer,
    info: EngineInfo,
    seed: int,
) -> SamplingParams:
    """Everything about sampling; `seed` is used when the body has none.

    Raises:
        InvalidRequestError: A value is out of range; names the field as it is called on the wire.
    """
    top_k = _first(body.top_k, defaults.top_k, 0)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=check_range("min_tokens", _first(body.min_tokens, 0), 0, info.max_model_len),
            temperature=_first(body.temperature, defaults.temperature, 1.0),
            top_k=0 if top_k == -1 else min(top_k, info.vocab_size),  # -1 is other servers' word for all
            top_p=_first(body.top_p, defaults.top_p, 1.0),
            min_p=_first(body.min_p, defaults.min_p, 0.0),
            presence_penalty=_first(body.presence_penalty, 0.0),
            frequency_penalty=_first(body.frequency_penalty, 0.0),
            repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
            seed=(seed if body.seed is None else body.seed) % 2**64,
            stop_token_ids=tuple(dict.fromkeys(_known_ids("stop_token_ids", body.stop_token_ids or [], info))),
            ignore_eos=bool(body.ignore_eos),
            logit_bias=_logit_bias(body.logit_bias or {}, info),
            bad_words_token_ids=_bad_words(body.bad_words or [], tokenizer),
            allowed_token_ids=(
                None
                if body.allowed_token_ids is None
                else tuple(dict.fromkeys(_known_ids("allowed_token_ids", body.allowed_token_ids, info)))
            ),
            logprobs=logprobs,
            logprob_token_ids=tuple(_known_ids("logprob_token_ids", body.logprob_token_ids or [], info)),
            prompt_logprobs=prompt_logprobs,
        )
    except ValueError as exc:
        raise InvalidRequestError(str(exc), param=str(exc).split()[0]) from None


def num_to_look_at(body: GenerationBody) -> int:
    """Characters that `build_sampling_params` encodes, and ids that it checks."""
    return sum(map(len, body.bad_words or ())) + len(body.allowed_token_ids or ())


def build_text_options(body: GenerationBody, *, track_tokens: bool) -> TextOptions:
    """How output becomes text."""
    return TextOptions(
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        include_stop=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
        track_tokens=track_tokens,
    )


def stop_list(body: GenerationBody) -> list[str]:
    """The stop strings, whichever way they were written."""
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"stop must hold at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
    for i, stop in enumerate(stops):
        if not stop:
            param = "stop" if isinstance(body.stop, str) else f"stop[{i}]"
            raise InvalidRequestError(f"{param} must not be empty", param=param)
        check_range(f"the length of stop[{i}]", len(stop), 1, MAX_STOP_CHARS, param="stop")
    return stops


def check_range(name: str, value: int, low: int, high: int | None, *, param: str | None = None) -> int:
    """Return the value; `param` is the field when `name` is not.

    Raises:
        InvalidRequestError: It is out of bounds.
    """
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(f"{name} must be {bound}, got {shown(value)}", param=param or name)
    return value


def check_common(body: GenerationBody, max_n: int) -> None:
    """Check the fields of every generating endpoint that are neither sampling nor text."""
    if body.n is not None:
        check_range("n", body.n, 1, max_n)
    if body.priority is not None:
        check_range("priority", body.priority, -_MAX_PRIORITY, _MAX_PRIORITY)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options is only allowed when stream is true", param="stream_options")


def _first(*values: T | None) -> T:
    """The first that is not None; the last never is."""
    return next(value for value in values if value is not None)


def _known_ids(name: str, token_ids: list[int], info: EngineInfo) -> list[int]:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < info.vocab_size:
        for i, token_id in enumerate(token_ids):
            check_range(f"{name}[{i}]", token_id, 0, info.vocab_size - 1)
    return token_ids


def _logit_bias(logit_bias: dict[str, float], info: EngineInfo) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in logit_bias.items():
        if not re.fullmatch("[0-9]{1,9}", key) or int(key) >= info.vocab_size:
            bound = f"token ids between 0 and {info.vocab_size - 1}"
            raise InvalidRequestError(
                f"logit_bias must have keys that are {bound}, got {shown(key)}", param="logit_bias"
            )
        bias[int(key)] = value
    return bias


def _bad_words(words: list[str], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    check_range("the number of bad_words", len(words), 0, MAX_BAD_WORDS, param="bad_words")
    for i, word in enumerate(words):
        if not word.strip():
            raise InvalidRequestError("bad_words must not hold an empty word", param=f"bad_words[{i}]")
        check_range(f"the length of bad_words[{i}]", len(word), 1, MAX_STOP_CHARS, param=f"bad_words[{i}]")
    return tuple(ids for word in words for ids in tokenizer.bad_word_ids(word))
