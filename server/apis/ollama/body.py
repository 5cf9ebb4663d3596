"""Bodies and answers in Ollama's shape, and the chat and completion bodies that are made of the bodies."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import AliasChoices, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from weft.server.errors import InvalidRequestError, shown
from weft.server.http.sse import Framing
from weft.server.sampling import GenerationDefaults
from weft.server.task.bodies import MAX_MESSAGES, ChatCompletionBody, CompletionBody, ContentPart, Message
from weft.server.task.schema import Int, Items, ResponseFormat, Text, TextOrTexts, ToolDefinition, WireModel
from weft.server.task.validation import Refused, check_range
from weft.server.text.declared import FORMAT_KINDS, format_form
from weft.server.text.replayed import Reasoning, read_turns

FRAMING = Framing("application/x-ndjson", ping=b"", after_ping=b"")


def time_text(seconds: float | None = None) -> str:
    """A time as Ollama writes it; None: now."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat().replace("+00:00", "Z")


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


_FORMAT: dict[str, Any] = {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}, {"type": "null"}]}


def _format(value: object) -> object:
    """A schema, which may have faults as those of tools, or a format in the form of another API."""
    if value in ("", "text", "json", None):
        return value or None
    if not isinstance(value, dict):
        raise PydanticCustomError("format", "input should be '' or 'json', or a JSON schema")
    form = format_form(value)
    if form.kind not in [*FORMAT_KINDS] or form.members.get("schema") is value:  # a list: a kind may be anything
        return {"json_schema": {"schema": value, "strict": False}}
    return value


WholeNumber = Annotated[Int, BeforeValidator(_whole)]
"""An integer, which clients in Go and Java may write as 10.0."""


class Options(WireModel):
    """How to generate. The other options of Ollama are about the machine."""

    num_predict: WholeNumber | None = None
    num_ctx: WholeNumber | None = None
    temperature: float | None = None
    top_k: WholeNumber | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: WholeNumber | None = None
    stop: TextOrTexts | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaBody(WireModel):
    """What both bodies have. Without `stream` the answer is streamed."""

    model: Text | None = None
    stream: bool | None = None
    format: Annotated[ResponseFormat | None, BeforeValidator(_format), WithJsonSchema(_FORMAT)] = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None

    # accepted, not honoured
    keep_alive: float | Text | None = None


class OllamaPicture(ContentPart):
    """A picture of a turn, in base64, and its path in the body."""

    data: Text
    place: Text


class OllamaMessage(Message):
    """One turn. A tool's turn names the tool, or follows the calls in their order. Pictures stand before the text."""

    images: Items[Text] | None = None
    reasoning_content: Reasoning = Field(default=None, validation_alias=AliasChoices("thinking", "reasoning_content"))
    name: Text | None = Field(default=None, validation_alias=AliasChoices("tool_name", "name"))


_Turns = Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES), BeforeValidator(read_turns)]


class OllamaChatBody(OllamaBody):
    """The body of POST /api/chat. Without messages it only asks whether the model is there."""

    messages: _Turns | None = None
    tools: Items[ToolDefinition] | None = None


class OllamaGenerateBody(OllamaBody):
    """The body of POST /api/generate. `raw` leaves the chat template out, as `suffix` does."""

    prompt: Text | None = None
    suffix: Text | None = None
    system: Text | None = None
    images: Items[Text] | None = None
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
    """The body of POST /api/show and DELETE /api/delete; `name` is the older word."""

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


RENAMED: Mapping[str, str] = {
    r"^(temperature|top_k|top_p|min_p|seed|stop|presence_penalty|frequency_penalty)(?=$|\[)": r"options.\1",
    r"^repetition_penalty": "options.repeat_penalty",
    r"^max_tokens": "options.num_predict",
    r"^response_format(\.json_schema\.schema)?": "format",
    r"^reasoning_effort": "think",
}
"""Beginnings of paths in the bodies made here, and what the caller calls them."""
_OFF: Refused = {
    "options.mirostat": (None, 0),
    "options.typical_p": (None, 1),
    "options.tfs_z": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
}
REFUSED_IN_OLLAMA_CHAT: Refused = _OFF
REFUSED_IN_OLLAMA_GENERATE: Refused = {**_OFF, "context": (None, []), "template": (None, "")}


def check_context(body: OllamaBody, max_model_len: int, *, strict: bool) -> None:
    """Check the length of the context that the body asks for. It is cut to the model's unless `strict` is set.

    Raises:
        InvalidRequestError: It is out of range.
    """
    if body.options and body.options.num_ctx is not None:
        check_range("options.num_ctx", body.options.num_ctx, 1, max_model_len if strict else None)


def cut_options(body: OllamaBody, max_model_len: int) -> list[str]:
    """The options that ask for more than there is."""
    num_ctx = body.options.num_ctx if body.options else None
    return ["options.num_ctx"] if num_ctx is not None and num_ctx > max_model_len else []


_USUAL_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.0}
"""Ollama's own (since August 2026 without a penalty), for what neither a model nor the operator states."""


def chat_of(body: OllamaChatBody, defaults: GenerationDefaults) -> ChatCompletionBody:
    """The conversation to answer, by a model with these defaults.

    Raises:
        InvalidRequestError: An option is out of range.
    """
    messages = [_with_pictures(each, each.images, f"messages[{i}].") for i, each in enumerate(body.messages or ())]
    tools = body.tools or None
    return ChatCompletionBody(
        **_shared_fields(body, defaults), messages=messages, tools=tools, reasoning_effort=_effort(body)
    )


def _with_pictures(turn: Message, images: Sequence[str] | None, at: str) -> Message:
    """The turn with these pictures before its text."""
    if not images:
        return turn
    pictures = [OllamaPicture(type="image", data=data, place=f"{at}images[{i}]") for i, data in enumerate(images)]
    said = [ContentPart(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content or []
    return turn.model_copy(update={"content": [*pictures, *said]})


def chat_of_prompt(body: OllamaGenerateBody, defaults: GenerationDefaults) -> ChatCompletionBody:
    """A prompt as a conversation of one turn."""
    system = [Message(role="system", content=body.system)] if body.system else []
    return ChatCompletionBody(
        **_shared_fields(body, defaults),
        messages=[*system, _with_pictures(Message(role="user", content=body.prompt or ""), body.images, "")],
        reasoning_effort=_effort(body),
    )


def completion_of(body: OllamaGenerateBody, defaults: GenerationDefaults) -> CompletionBody:
    """A prompt that is continued as it is.

    Raises:
        InvalidRequestError: The body asks for what only a chat template has room for, or an option is out of range.
    """
    for name, value in (("system", body.system), ("think", body.think), ("images", body.images)):
        if value:
            given = "raw" if body.raw else "suffix"
            message = f"{name} cannot be used with {given}, which leaves out the chat template, got {shown(value)}"
            raise InvalidRequestError(message, param=name)
    return CompletionBody(**_shared_fields(body, defaults), prompt=body.prompt or "", suffix=body.suffix)


def _shared_fields(body: OllamaBody, defaults: GenerationDefaults) -> dict[str, Any]:
    options = body.options or Options()
    spelled = {"repetition_penalty": "repeat_penalty"}
    given = {name: getattr(options, spelled.get(name, name)) for name in _USUAL_SAMPLING}
    num_predict = options.num_predict
    return {
        "model": body.model,
        "stream": body.stream is not False,
        "max_tokens": None if num_predict in (None, -1, -2) else num_predict,  # without end; as the context allows
        **defaults.over(_USUAL_SAMPLING),
        **{name: value for name, value in given.items() if value is not None},
        "seed": options.seed,
        "stop": options.stop or None,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "response_format": body.format,
    }


def _effort(body: OllamaBody) -> Any:
    if isinstance(body.think, bool):
        return "medium" if body.think else "none"
    return body.think
