"""Wire types of the routes under /api/, in Ollama's shape: bodies, answers and lines of a stream."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, Tag

from weft.server.schemas.chat_completions import MAX_MESSAGES
from weft.server.schemas.common import TEXT_OR_OTHER, Int, Items, Text, TextOrTexts, WireModel
from weft.server.schemas.tools import ToolDefinition

Format = Annotated[Annotated[Literal["", "json"], Tag("text")] | Annotated[dict[str, Any], Tag("other")], TEXT_OR_OTHER]


class Options(WireModel):
    """How to generate. The other options of Ollama are about the machine."""

    num_predict: Int | None = None
    num_ctx: Int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: TextOrTexts | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaBody(WireModel):
    """What both bodies have. Without `stream` the answer is streamed."""

    model: Text | None = None
    stream: bool | None = None
    format: Format | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None

    # accepted, not honoured
    keep_alive: float | Text | None = None


class CalledFunction(WireModel):
    """The function of an earlier call."""

    name: Text
    arguments: dict[str, Any]


class EarlierCall(WireModel):
    """A call of an earlier turn."""

    function: CalledFunction


class OllamaMessage(WireModel):
    """One turn. A tool's turn names the tool, or follows the calls in their order."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    tool_calls: Items[EarlierCall] | None = None
    tool_name: Text | None = None


class OllamaChatBody(OllamaBody):
    """The body of POST /api/chat. Without messages it only asks whether the model is there."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    tools: Items[ToolDefinition] | None = None


class OllamaGenerateBody(OllamaBody):
    """The body of POST /api/generate. `raw` leaves the chat template out, as `suffix` does."""

    prompt: Text | None = None
    suffix: Text | None = None
    system: Text | None = None
    raw: bool | None = None


class NoOptions(WireModel):
    """All options of Ollama are about generating or the machine, so none has an effect on vectors."""


class OllamaEmbedBody(WireModel):
    """The body of POST /api/embed. Without input it only asks whether the model is there."""

    model: Text | None = None
    input: TextOrTexts | None = None
    truncate: bool | None = None
    dimensions: Int | None = None
    options: NoOptions | None = None

    # accepted, not honoured
    keep_alive: float | Text | None = None


class OllamaEmbeddingsBody(WireModel):
    """The body of POST /api/embeddings, the older route for one text."""

    model: Text | None = None
    prompt: Text | None = None
    options: NoOptions | None = None

    # accepted, not honoured
    keep_alive: float | Text | None = None


class ShowBody(WireModel):
    """The body of POST /api/show; `name` is the older word."""

    model: Text | None = None
    name: Text | None = None


class ToolCallFunction(msgspec.Struct):
    """The function that the model calls."""

    name: str
    arguments: dict[str, Any]
    index: int


class ToolCallMember(msgspec.Struct):
    """One call."""

    function: ToolCallFunction


class MessageMember(msgspec.Struct):
    """The answer, or what it gained."""

    content: str = ""
    role: Literal["assistant"] = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCallMember] | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """The whole answer, or one line of a stream. Only what is done has counts; durations are in nanoseconds."""

    model: str
    created_at: str
    message: MessageMember | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaEmbedded(msgspec.Struct):
    """The answer of POST /api/embed; durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct):
    """The answer of POST /api/embeddings."""

    embedding: list[float]
