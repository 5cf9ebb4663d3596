"""Wire types of POST /tokenize, /detokenize and the routes that end with /render, the same as vLLM's."""

from typing import Any

import msgspec

from weft.server.schemas.chat_completions import Messages
from weft.server.schemas.common import Int, Items, Text, WireModel
from weft.server.schemas.tools import ToolDefinition


class TokenizeBody(WireModel):
    """The body of POST /tokenize: a prompt or messages, not both."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Items[ToolDefinition] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct):
    """The token ids, and the text of each if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(WireModel):
    """The body of POST /detokenize: token ids."""

    model: Text | None = None
    tokens: Items[Int]


class DetokenizeAnswer(msgspec.Struct):
    """The text of the ids, control tokens included."""

    prompt: str


class RenderedPrompt(msgspec.Struct):
    """A prompt as the engine gets it."""

    request_id: str
    model: str
    token_ids: list[int]
