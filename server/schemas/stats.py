"""Wire types of GET /stats: the model's abilities and the state of the engine."""

from collections.abc import Mapping
from typing import Any

import msgspec


class ThinkingSwitch(msgspec.Struct):
    """The `chat_template_kwargs` that turn reasoning on, and those that turn it off."""

    on: Mapping[str, Any]
    off: Mapping[str, Any]


class Stats(msgspec.Struct):
    """The model's abilities, and the state of the engine.

    Attributes:
        max_model_len: Null while the engine loads.
        has_tools: Whether the chat template shows tools.
        thinking: How to switch reasoning; null: there is no switch.
        engine: One reading of the status page, with the names of `weft.engine.wire.status_page.Status`.
    """

    model: str
    version: str
    is_ready: bool
    max_model_len: int | None
    has_tools: bool
    thinking: ThinkingSwitch | None
    engine: Mapping[str, float]
