"""Wire types that several endpoints share: fields of a body, tools, structured output, and parts of an answer.

Only types are checked here. Ranges are checked where the values become `SamplingParams`. JSON null always means absent.
Bodies are pydantic models, for good error messages. Answers are msgspec structs, for speed: one is written per token.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from weft.server.text.declared import format_form, tool_form, with_schema
from weft.server.text.replayed import MAX_DEPTH, read_nested_choice

Text = str
"""Text; `weft.server.task.validation` refuses lone surrogates (\\ud800), which tokenizers cannot hold."""

Int = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
"""The integers that MessagePack, and so a message to the engine, can hold."""

MAX_ITEMS = 2**20 + 2**12
"""Most values in a body, and so in a list: the ids of the longest prompt, and some more."""

_T = TypeVar("_T")
Items = Annotated[list[_T], Field(fail_fast=True, max_length=MAX_ITEMS)]
"""A list. Only its first wrong item is reported, because error reports take many times the memory of the items."""

MAX_MEMBERS = 2**14


def fewer(value: object) -> object:
    """Refuse an object with too many members before any member is checked."""
    if isinstance(value, dict) and len(value) > MAX_MEMBERS:
        raise PydanticCustomError("too_many", f"input should have at most {MAX_MEMBERS} members")
    return value


Members = Annotated[dict[str, _T], BeforeValidator(fewer)]
"""An object with any member names. The members are checked only if there are not too many."""


class WireModel(BaseModel):
    """A JSON object from a client. Types are exact ("1" is not a number). Unknown fields are kept, to be reported."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, hide_input_in_errors=True)
    spoken: ClassVar[frozenset[str]] = frozenset({"messages", "system"})
    """Members of a body that hold a conversation; see `check_utf8`."""


TEXT_OR_OTHER = Discriminator(lambda value: "other" if isinstance(value, list | dict) else "text")
"""Chooses the type in a union of text and another type, so that errors are about the type that the caller meant."""

TextOrTexts = Annotated[Annotated[Text, Tag("text")] | Annotated[Items[Text], Tag("other")], TEXT_OR_OTHER]

ObjectOrText = Annotated[Annotated[Text, Tag("text")] | Annotated[dict[str, Any], Tag("other")], TEXT_OR_OTHER]
"""A JSON object, or its JSON text."""

ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]


class StreamOptions(WireModel):
    """How to stream. `continuous_usage_stats` is an extension: usage on every chunk."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class PromptCacheOptions(WireModel):
    """How a request uses the prefix cache; `ttl` is 30m or 12h."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Text | None = None


class KvTransferParams(WireModel):
    """vLLM's words between a server that computes a prompt (remote prefill) and one that continues it (remote decode).

    `remote_...` says where vLLM fetches blocks from. `cache_salt` is Weft's own: the whole salt of the other request.
    """

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: Text | None = None
    remote_block_ids: Any = None
    remote_host: Text | None = None
    remote_port: Any = None
    cache_salt: Text | None = None


class GenerationBody(WireModel):
    """Fields of every generating endpoint. Extensions have the names that other servers use."""

    model: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None  # any size: only the last 64 bits are used
    stop: TextOrTexts | None = None
    logit_bias: Members[float] | None = None
    service_tier: ServiceTier | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_key: Text | None = None

    # extensions
    top_k: int | None = None  # any size: limited to the vocabulary
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
    no_repeat_ngram_size: Int | None = None
    source_language: Text | None = None
    target_language: Text | None = None
    prewarm: bool | None = None
    kv_transfer_params: KvTransferParams | None = None

    # accepted, not honoured
    user: Text | None = None


MAX_STRUCTURES = 1024
"""Most tagged structures, and most triggers."""


class JsonSchema(WireModel):
    """A schema inside OpenAI's wrapper, which gives it a name."""

    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TaggedStructure(WireModel):
    """JSON that follows the schema, between `begin` and `end`."""

    begin: Text
    schema_: dict[str, Any] = Field(alias="schema")
    end: Text


class AnswerFormat(WireModel):
    """How an answer shall be formatted. It may be sent in the form of any API."""

    is_nested: ClassVar[bool]
    _schema_at: str = PrivateAttr(default="")

    @property
    def schema_at(self) -> str:
        """Where the schema stands in what was sent."""
        return self._schema_at

    @model_validator(mode="wrap")
    @classmethod
    def _in_any_form(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(value, str | dict):
            return handler(value)
        form = format_form(value)
        made = handler(form.nested if cls.is_nested else form.flat)
        made._schema_at = form.at
        return made


class ResponseFormat(AnswerFormat):
    """OpenAI's `response_format`. `structures` and `triggers` belong to structural_tag, an extension."""

    is_nested = True
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Annotated[Items[TaggedStructure], Field(max_length=MAX_STRUCTURES)] | None = None
    triggers: Annotated[Items[Text], Field(max_length=MAX_STRUCTURES)] | None = None


class StructuralTag(WireModel):
    """The structural tag inside structured_outputs, where it is JSON text or an object."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[Items[TaggedStructure], Field(max_length=MAX_STRUCTURES)]
    triggers: Annotated[Items[Text], Field(max_length=MAX_STRUCTURES)]


class StructuredOutputs(WireModel):
    """vLLM's `structured_outputs`. Exactly one member is given."""

    json_: ObjectOrText | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Items[Text] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: ObjectOrText | None = None


class GuidedBody(GenerationBody):
    """Fields of both endpoints that constrain the answer. The `guided_...` names are vLLM's older ones."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: ObjectOrText | None = None
    guided_regex: Text | None = None
    guided_choice: Items[Text] | None = None
    guided_grammar: Text | None = None


_SIGNS = r'"<>\\\x00-\x1f\x7f'
ToolName = Annotated[Text, Field(pattern=rf"^[^\s{_SIGNS}]([^{_SIGNS}]{{0,254}}[^\s{_SIGNS}])?$")]
"""Longer than OpenAI's 64 characters: agents put the name of an MCP server before that of its tool. With any signs that
all formats of calls can hold."""


class FunctionDefinition(WireModel):
    """A function. If `parameters` is absent, it takes none."""

    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _with_schema(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return handler(with_schema(value) if isinstance(value, dict) else value)


class GrammarDefinition(WireModel):
    """The grammar of a custom tool's input."""

    syntax: Text
    definition: Text


class CustomFormat(WireModel):
    """The format of a custom tool's input: free text, or text that follows a grammar."""

    type: Literal["text", "grammar"]
    grammar: GrammarDefinition | None = None


class CustomDefinition(WireModel):
    """A tool whose input is text."""

    name: ToolName
    description: Text | None = None
    format: CustomFormat | None = None


class ToolDefinition(WireModel):
    """One entry of `tools`, which may be sent in the form of any API. One of another kind is an `OtherTool`."""

    type: Text
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _in_any_form(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> "ToolDefinition":
        if cls is not ToolDefinition or not isinstance(value, dict):
            return handler(value)
        form = tool_form(value)
        return handler(form.nested) if form.is_called else OtherTool(type=form.kind)


class OtherTool(ToolDefinition):
    """A tool that this server does not host, such as web_search. Its members are of no use."""


class NamedTool(WireModel):
    """The name of a tool."""

    name: Text


class ToolReference(WireModel):
    """A reference to a tool by kind and name."""

    type: Literal["function", "custom"]
    function: NamedTool | None = None
    custom: NamedTool | None = None


class AllowedTools(WireModel):
    """A subset of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Items[ToolReference]


class ToolChoiceObject(WireModel):
    """One tool that must be called, or the tools that may be called."""

    type: Literal["function", "custom", "allowed_tools"]
    function: NamedTool | None = None
    custom: NamedTool | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")] | Annotated[ToolChoiceObject, Tag("other")],
    TEXT_OR_OTHER,
    BeforeValidator(read_nested_choice),
]

FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("text")] | Annotated[NamedTool, Tag("other")], TEXT_OR_OTHER
]
"""The deprecated `function_call`."""


class PromptLogprob(msgspec.Struct):
    """One id at one position of a prompt. `rank` is null if the token is not among the most probable ones."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""One entry per position of the prompt; null for the first token, which has no context."""


class CachedTokens(msgspec.Struct):
    """Prompt tokens that were read from the prefix cache, and tokens that were written to it."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokens(msgspec.Struct):
    """Output tokens by what they were spent on."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    """Token counts of one HTTP request. Each prompt counts once; all choices count."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: OutputTokens


class KvTransfer(msgspec.Struct):
    """The `kv_transfer_params` of an answer: what to send with the prompt to the server that continues it.

    The blocks are in the folder that both share.
    """

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_engine_id: None = None
    remote_block_ids: None = None
    remote_host: None = None
    remote_port: None = None


MAX_OPAQUE_CHARS = 4096
"""A longer text without a space is an image or something sealed. The prompt has its length instead."""


_NOT_SHOWN = frozenset(
    {"type", "id", "call_id", "tool_use_id", "status", "execution", "encrypted_content", "cache_control"}
)


def shown_members(members: Mapping[str, Any]) -> dict[str, Any]:
    """The members that can mean something to the model, without ids and without what is opaque."""
    return {name: _shortened(value) for name, value in members.items() if name not in _NOT_SHOWN}


def foreign_text(kind: str, members: Mapping[str, Any]) -> str:
    """A part of a conversation of a type that is not known here, as text."""
    return f"{kind}: {json_text(shown_members(members))}"


def json_text(value: object) -> str:
    """A value as compact JSON."""
    return msgspec.json.encode(value).decode()


def _shortened(value: Any, depth: int = MAX_DEPTH) -> Any:
    if isinstance(value, str) and len(value) > MAX_OPAQUE_CHARS and " " not in value:
        return f"({len(value)} characters)"
    if not depth and isinstance(value, list | dict):
        return f"({len(value)} members)"
    if isinstance(value, dict):
        return {name: _shortened(inner, depth - 1) for name, inner in value.items() if name != "encrypted_content"}
    return [_shortened(inner, depth - 1) for inner in value] if isinstance(value, list) else value
