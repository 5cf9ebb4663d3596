"""Wire shapes of POST /tokenize and /detokenize, as vLLM has them."""

from typing import Any

import msgspec

from weft.server.schemas.chat_completions import Messages
from weft.server.schemas.common import Int, Items, Text, WireModel
from weft.server.schemas.tools import ToolDefinition


class TokenizeBody(WireModel):
    """A prompt or messages, not both."""

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
    """The ids, and on request the text of each."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(WireModel):
    """Token ids."""

    model: Text | None = None
    tokens: Items[Int]


class DetokenizeAnswer(msgspec.Struct):
    """Their text, control tokens included."""

    prompt: str
