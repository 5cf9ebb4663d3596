"""Wire types of POST /v1/chat/completions and /v1/completions: the bodies, the answers, and the chunks of streams.

The chunks of /v1/completions have the type of its answer.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator

from weft.server.task import schema
from weft.server.task.schema import TEXT_OR_OTHER, Int, Items, Text, Usage, WireModel
from weft.server.text.replayed import CallId, JsonText, Reasoning, read_call, read_parts, read_turns


class CacheBreakpoint(WireModel):
    """Keep the prompt up to the end of this part in the prefix cache for `ttl`."""

    mode: Literal["explicit"] | None = None
    ttl: Text | None = None


class ImageUrl(WireModel):
    """Where a picture is; `detail` asks for how many pixels of it the model sees."""

    url: Text
    detail: Text | None = None


Address = Annotated[Annotated[Text, Tag("text")] | Annotated[ImageUrl, Tag("other")], TEXT_OR_OTHER]


class ContentPart(WireModel):
    """One part of a message's content; which types are accepted depends on the role."""

    type: Text
    text: Text | None = None
    refusal: Text | None = None
    image_url: Address | None = None
    file_id: Text | None = None
    detail: Text | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


Content = Annotated[Annotated[Text, Tag("text")] | Annotated[Items[ContentPart], Tag("other")], TEXT_OR_OTHER]


class FunctionCall(WireModel):
    """A call that the model made in an earlier turn; `arguments` is JSON text, or what the model wrote instead."""

    name: Text
    arguments: JsonText = ""


class CustomCall(WireModel):
    """A call of a custom tool that the model made in an earlier turn."""

    name: Text
    input: JsonText = ""


class ToolCall(WireModel):
    """A tool call of an earlier turn."""

    id: CallId | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class Message(WireModel):
    """One turn of the conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: Text | None = None
    refusal: Text | None = None
    reasoning_content: Reasoning = None
    reasoning: Reasoning = None
    tool_calls: Items[Annotated[ToolCall, BeforeValidator(read_call)]] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: CallId | None = None
    audio: dict[str, Any] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _in_any_form(cls, content: object, info: ValidationInfo) -> object:
        if isinstance(content, list) and any(isinstance(each, ContentPart) for each in content):
            return content  # of another API, which has read it
        return read_parts(content, info.data.get("role"))


class Prediction(WireModel):
    """Text that the answer will probably hold."""

    type: Literal["content"]
    content: Content


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningOptions(WireModel):
    """OpenRouter's object for `reasoning_effort`."""

    effort: Effort | None = None
    enabled: bool | None = None


MAX_MESSAGES = 2**14
Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES), BeforeValidator(read_turns)]

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    BeforeValidator(schema.fewer),
]


class ChatCompletionBody(schema.GuidedBody):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Items[schema.ToolDefinition] | None = None
    tool_choice: schema.ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Items[schema.FunctionDefinition] | None = None
    function_call: schema.FunctionChoice | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    prediction: Prediction | None = None

    # extensions
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Int | None = None
    reasoning_budget_tokens: Int | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Items[dict[str, Any]] | None = None

    # accepted, not honoured
    safety_identifier: Text | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class TopLogprob(msgspec.Struct):
    """One alternative for a token; `bytes` are its raw bytes, even if they are not a whole character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """One token of the answer."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    """Log-probabilities of the tokens of the text in the same object."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    """A function with its arguments as JSON text. In a stream, only the first chunk of a call has the name."""

    arguments: str
    name: str | UnsetType = UNSET


class CalledCustom(msgspec.Struct):
    """A custom tool with its input."""

    input: str
    name: str | UnsetType = UNSET


class AnsweredCall(msgspec.Struct, kw_only=True):
    """A whole call, or its new part. Only streams have `index`. Only the first chunk of a call has id and type."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    """The model's answer. Reasoning is sent under both names that clients look for."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    annotations: list[None] = []
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class Choice(msgspec.Struct):
    """One of the n answers. `stop_reason` and `token_ids` are extensions."""

    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The plain answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    kv_transfer_params: schema.KvTransfer | UnsetType = UNSET
    system_fingerprint: str
    service_tier: str
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    prompt_logprobs: schema.PromptLogprobs | UnsetType = UNSET


class ChunkDelta(msgspec.Struct):
    """The new part of a choice. `refusal` is only sent with the role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """The one choice of a chunk."""

    index: int
    delta: ChunkDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a stream. `usage` is null on all but the last chunk if it was requested, absent otherwise."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    service_tier: str
    obfuscation: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


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


class CompletionBody(schema.GuidedBody):
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
    prompt_logprobs: schema.PromptLogprobs | UnsetType = UNSET


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
    kv_transfer_params: schema.KvTransfer | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET
