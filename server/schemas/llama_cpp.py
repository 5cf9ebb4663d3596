"""Wire types of POST /completion and /infill, in llama.cpp's shape: the bodies, the answer, the events of a stream."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Discriminator, Field, Tag

from weft.server.schemas.common import MAX_MEMBERS, TEXT_OR_OTHER, Int, Items, Members, Text, TextOrTexts, WireModel

Bias = float | Literal[False]
"""What is added to a token's logit; false: the token never comes."""
BiasPair = Annotated[list[Bias], Field(min_length=2, max_length=2)]
"""A token id and its bias."""

Biases = Annotated[
    Annotated[Members[Bias], Tag("object")] | Annotated[Items[BiasPair], Field(max_length=MAX_MEMBERS), Tag("list")],
    Discriminator(lambda value: "object" if isinstance(value, dict) else "list"),
]


class LlamaCppBody(WireModel):
    """What both bodies have. Extensions of llama.cpp to sampling that are not here are refused if they are on."""

    model: Text | None = None
    stream: bool | None = None
    n_predict: Int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: TextOrTexts | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    ignore_eos: bool | None = None
    n_probs: Int | None = None
    return_tokens: bool | None = None
    cache_prompt: bool | None = None
    grammar: Text | None = None
    json_schema: dict[str, Any] | None = None


class LlamaCppCompletionBody(LlamaCppBody):
    """The body of POST /completion."""

    prompt: Annotated[Annotated[Text, Tag("text")] | Annotated[Items[Int], Tag("other")], TEXT_OR_OTHER]


class ExtraText(WireModel):
    """Another file, which the model sees in front of the prefix."""

    text: Text
    filename: Text | None = None


class InfillBody(LlamaCppBody):
    """The body of POST /infill. `prompt` is the beginning of the text to fill in."""

    input_prefix: Text
    input_suffix: Text
    input_extra: Annotated[Items[ExtraText], Field(max_length=MAX_MEMBERS)] | None = None
    prompt: Text | None = None


class TokenProb(msgspec.Struct):
    """One token with its log-probability."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class CompletionProb(TokenProb):
    """One token of the answer, and the most probable ones in its place."""

    top_logprobs: list[TokenProb]


class Timings(msgspec.Struct):
    """How long the prompt and the output took."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaCppAnswer(msgspec.Struct, kw_only=True):
    """The whole answer, or one event of a stream; what follows `tokens_evaluated` comes at the end only."""

    index: int = 0
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int = -1
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[CompletionProb] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["eos", "word", "limit"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
