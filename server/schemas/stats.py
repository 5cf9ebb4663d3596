"""Wire shapes of GET /stats."""

from collections.abc import Mapping
from typing import Any

import msgspec


class ThinkingSwitch(msgspec.Struct):
    """The `chat_template_kwargs` that turn thinking on, and those that turn it off."""

    on: Mapping[str, Any]
    off: Mapping[str, Any]


class EngineStats(msgspec.Struct):
    """One reading of the engine's status page; its fields are those of `weft.engine.shared.status_page.Status`."""

    num_requests_running: int
    num_requests_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_steps: int
    step_seconds: float
    prefill_tokens: int
    decode_tokens: int


class Stats(msgspec.Struct):
    """What the model can do, and the state of the engine.

    Attributes:
        max_model_len: Null while the engine loads.
        has_tools: Whether the chat template shows tools.
        thinking: How reasoning is switched; null: there is no switch.
    """

    model: str
    version: str
    is_ready: bool
    max_model_len: int | None
    has_tools: bool
    thinking: ThinkingSwitch | None
    engine: EngineStats
