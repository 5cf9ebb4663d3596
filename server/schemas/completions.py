"""Wire types of POST /v1/completions: the body and the answer. Chunks have the answer's type."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Discriminator, Field, Tag

from weft.server.schemas.common import Int, Items, PromptLogprobs, Text, Usage
from weft.server.schemas.kv_transfer import KvTransfer
from weft.server.schemas.structured_output import GuidedBody

MAX_PROMPTS = 2**14
"""Most prompts that validation looks at. The settings allow fewer."""


def _prompt_shape(value: object) -> str:
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "token_id_lists"
    return "texts" if isinstance(first, str) else "token_ids"


Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[Items[Int], Tag("token_ids")]
    | Annotated[list[Items[Int]], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("token_id_lists")],
    Discriminator(_prompt_shape),
]


class CompletionBody(GuidedBody):
    """The body of POST /v1/completions. If the prompt is absent or null, it is the beginning-of-text token."""

    prompt: Prompt | None = None
    best_of: Int | None = None
    echo: bool | None = None
    logprobs: Int | None = None
    add_special_tokens: bool | None = None
    suffix: Text | None = None


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists with one entry per token. Offsets count the characters of prompt and text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """A whole choice, or its new part. `stop_reason` and the token ids are extensions."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The plain answer, and every chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    service_tier: str
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: KvTransfer | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET
