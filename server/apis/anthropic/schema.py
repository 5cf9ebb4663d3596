"""Wire types of POST /v1/messages, Anthropic's shape of a conversation: body, answer, events of a stream."""

from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, ModelWrapValidatorHandler, Tag, model_validator

from weft.server.task.bodies import MAX_MESSAGES
from weft.server.task.schema import TEXT_OR_OTHER, Int, Items, Text, ToolName, WireModel
from weft.server.text.declared import tool_form
from weft.server.text.replayed import REASONING_PARTS, SEALED_PARTS, CallId, Reasoning, read_block

UNSEEN_BLOCKS = frozenset({"image", "document", "container_upload", "audio", "video", "file"})
"""Blocks that the model cannot take, and whose content no text stands for."""


class CacheControl(WireModel):
    """Keep the prompt up to the end of this block in the prefix cache for `ttl`."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


KNOWN_BLOCKS = frozenset({"text", "tool_use", "tool_result", *REASONING_PARTS, *SEALED_PARTS, *UNSEEN_BLOCKS})
"""Types of blocks whose members are read. Blocks of other types become text."""


class ImageSource(WireModel):
    """Where a picture is: in base64, at a URL, or in a file of /v1/files."""

    type: Text
    media_type: Text | None = None
    data: Text | None = None
    url: Text | None = None
    file_id: Text | None = None


class Block(WireModel):
    """One block of a content; which types are accepted depends on its message.

    A block of another type is an `OtherBlock`, whose members may be anything.
    """

    type: Text
    text: Text | None = None
    thinking: Reasoning = None
    signature: Text | None = None
    id: CallId | None = None
    name: Text | None = None
    input: Any = None
    tool_use_id: CallId | None = None
    content: "Blocks | None" = None
    is_error: bool | None = None
    source: ImageSource | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_type(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> "Block":
        kind = value.get("type") if cls is Block and isinstance(value, dict) else None
        if not isinstance(kind, str):
            return handler(value)
        return handler(read_block(kind, value)) if kind in KNOWN_BLOCKS else OtherBlock.of(kind, value)


class OtherBlock(Block):
    """A block of another type, such as the result of a tool that another server hosts, with all its members."""

    members: dict[str, Any]

    @classmethod
    def of(cls, kind: str, members: dict[str, Any]) -> Self:
        """The block; only its mark for the cache is checked."""
        return cls.model_validate({"type": kind, "cache_control": members.get("cache_control"), "members": members})


Blocks = Annotated[Annotated[Text, Tag("text")] | Annotated[Items[Block], Tag("other")], TEXT_OR_OTHER]


class Turn(WireModel):
    """One turn of the conversation. A last turn of the assistant is continued."""

    role: Literal["user", "assistant", "system"]
    content: Blocks | None


class ClientTool(WireModel):
    """A tool that the caller runs. One of another type is a `ServerTool`."""

    type: Text | None = None
    name: ToolName
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_type(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> "ClientTool":
        if cls is not ClientTool or not isinstance(value, dict):
            return handler(value)
        form = tool_form(value)
        if not form.is_called:
            return ServerTool(type=form.kind, name="", cache_control=value.get("cache_control"))
        if form.kind == "function":
            inner = {key: given for key, given in form.inner.items() if key != "parameters"}
            value = {**form.outer, **inner, "input_schema": form.inner.get("parameters", {})}
        return handler(value)


class ServerTool(ClientTool):
    """A tool that this server does not host, such as web_search_20250305. Its other members are of no use."""

    name: Text


class ChosenTool(WireModel):
    """Which tools may be called, and whether one must be."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(WireModel):
    """Whether and how much to reason: `enabled`, `disabled` or `adaptive`, which leaves it to the model.

    `display` omitted leaves the reasoning out of the answer. Words of later versions are reported.
    """

    type: Text
    budget_tokens: Int | None = None
    display: Text | None = None


class OutputFormat(WireModel):
    """The answer is JSON that follows the schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(WireModel):
    """How the answer is made, and its format."""

    effort: Text | None = None
    format: OutputFormat | None = None


class UserMetadata(WireModel):
    """Whom the request is for."""

    user_id: Text | None = None


class CountTokensBody(WireModel):
    """The body of POST /v1/messages/count_tokens."""

    model: Text | None = None
    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Blocks | None = None
    tools: Items[ClientTool] | None = None
    tool_choice: ChosenTool | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None


class MessagesBody(CountTokensBody):
    """The body of POST /v1/messages."""

    max_tokens: Int
    stream: bool | None = None
    stop_sequences: Items[Text] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    # accepted, not honoured
    metadata: UserMetadata | None = None


class TokensCount(msgspec.Struct):
    """How many tokens the prompt has."""

    input_tokens: int


class CacheCreation(msgspec.Struct):
    """Tokens written to the cache. Nothing tells for how long, so they stand under the usual time."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int = 0


class ThinkingTokens(msgspec.Struct):
    """Output tokens that were spent on reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts. `input_tokens` are those that were neither read from the cache nor written to it."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    server_tool_use: None = None
    cache_creation: CacheCreation | UnsetType = UNSET
    service_tier: Literal["standard", "priority"] | UnsetType = UNSET


class TextBlock(msgspec.Struct, tag="text", kw_only=True):
    """Content."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """Reasoning. Clients want a signature; this server does not check it when the block comes back."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class AnsweredMessage(msgspec.Struct, tag="message", kw_only=True):
    """The whole answer; at the start of a stream, without content and end."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(msgspec.Struct, tag="message_start"):
    """The first event."""

    message: AnsweredMessage


class BlockStart(msgspec.Struct, tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: AnswerBlock


class TextDelta(msgspec.Struct, tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag="signature_delta"):
    """The end of the reasoning."""

    signature: str


class InputDelta(msgspec.Struct, tag="input_json_delta"):
    """More of the JSON text of a tool's input."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag="content_block_delta"):
    """The open block grows."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, tag="content_block_stop"):
    """The open block ends."""

    index: int


class MessageEnd(msgspec.Struct):
    """Why the answer ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag="message_delta"):
    """The end of the answer and the whole usage."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag="message_stop"):
    """The last event."""
