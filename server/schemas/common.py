"""Wire shapes that chat and legacy completions share: sampling fields of a body, usage of an answer.

Shapes only: ranges are checked where the values become `SamplingParams`. JSON null always means absent. Bodies are
pydantic models, because they need good error messages; answers are msgspec structs, because they are written once
per token.
"""

from typing import Annotated, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError


def _has_utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("string_unicode", "input should be text without lone surrogates") from None
    return text


Text = Annotated[str, AfterValidator(_has_utf8)]
"""JSON can write half of a character (\\ud800), which no tokenizer and no message to the engine can hold."""

Int = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
"""The integers that MessagePack can hold, and so a message to the engine."""

MAX_ITEMS = 2**20 + 2**12
"""Most values in a body: the ids of the longest prompt, and some more."""

_T = TypeVar("_T")
Items = Annotated[list[_T], Field(fail_fast=True, max_length=MAX_ITEMS)]
"""A list. Only its first wrong item is reported, because reports take many times the memory of the items."""


def fewer(value: object) -> object:
    """Refuse an object with too many members before its members are checked."""
    if isinstance(value, dict) and len(value) > MAX_MEMBERS:
        raise PydanticCustomError("too_many", f"input should have at most {MAX_MEMBERS} members")
    return value


MAX_MEMBERS = 2**14
Members = Annotated[dict[str, _T], BeforeValidator(fewer)]
"""An object whose members may have any names; they are checked only if they are not too many."""


class WireModel(BaseModel):
    """A JSON object from a client. Types are exact ("1" is no number); unknown fields are kept, to be reported."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, hide_input_in_errors=True)


TEXT_OR_OTHER = Discriminator(lambda value: "other" if isinstance(value, list | dict) else "text")
"""Chooses the type in a union of text and something else, so that an error is about the type that was meant."""

TextOrTexts = Annotated[Annotated[Text, Tag("text")] | Annotated[Items[Text], Tag("other")], TEXT_OR_OTHER]


class StreamOptions(WireModel):
    """How to stream. `continuous_usage_stats` is an extension: usage on every chunk."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class PromptCacheOptions(WireModel):
    """How a request uses the prefix cache; `weft.server.request.cache_options` decides which `ttl` are accepted."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Text | None = None


class GenerationBody(WireModel):
    """Fields of every generating endpoint; extensions of other servers' under their names."""

    model: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None  # of any size: its last 64 bits count
    stop: TextOrTexts | None = None
    logit_bias: Members[float] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_key: Text | None = None

    # extensions
    top_k: int | None = None  # of any size: at most the vocabulary
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    stop_token_ids: Annotated[Items[Int], Field(max_length=MAX_MEMBERS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Items[Text] | None = None
    allowed_token_ids: Items[Int] | None = None
    return_token_ids: bool | None = None
    cache_salt: Text | None = None
    priority: Int | None = None
    prompt_logprobs: Int | None = None
    logprob_token_ids: Items[Int] | None = None
    return_prompt_text: bool | None = None
    truncate_prompt_tokens: Int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prewarm: bool | None = None

    # accepted, not honoured
    user: Text | None = None


class PromptLogprob(msgspec.Struct):
    """One id at one position of a prompt; `rank` is null for a token that is not among the most probable ones."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""By position of the prompt; null for the first token, which nothing precedes."""


class CachedTokens(msgspec.Struct):
    """Prompt tokens that were read from the prefix cache, and those that were written to it."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokens(msgspec.Struct):
    """What the output tokens were spent on."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of one HTTP request: every prompt once, every choice."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: OutputTokens
