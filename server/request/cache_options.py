"""`prompt_cache_options` and `prompt_cache_breakpoint`: what a request does with the prefix cache.

Blocks are shared by content without being asked (mode implicit). Mode explicit without a breakpoint neither reads nor
writes the cache. A breakpoint keeps the prompt up to the end of its part for a time, in either mode.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from weft.engine.shared.messages import CachePolicy, Pin
from weft.server.errors import InvalidRequestError
from weft.server.request.validation import shown
from weft.server.schemas.chat_completions import Message
from weft.server.schemas.common import PromptCacheOptions

TTLS_S = {"30m": 1800.0, "12h": 43200.0}
DEFAULT_TTL = "30m"
MAX_BREAKPOINTS = 4
"""Of more, the last ones count."""

_OTHER_CHAR = "\uf8ff"
"""Put behind a part, it makes the prompt another one from there on; no template or tokenizer gives it a meaning."""


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A part behind which the prompt is to be kept: its place and for how long."""

    message: int
    part: int
    ttl_s: float


def find_breakpoints(messages: Sequence[Message], options: PromptCacheOptions | None) -> list[Breakpoint]:
    """The last breakpoints, in order.

    Raises:
        InvalidRequestError: A ttl is not among those that there are.
    """
    usual_s = _ttl_s(options.ttl if options else None, "prompt_cache_options.ttl") or TTLS_S[DEFAULT_TTL]
    found = []
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.prompt_cache_breakpoint is not None:
                path = f"messages[{i}].content[{j}].prompt_cache_breakpoint.ttl"
                found.append(Breakpoint(i, j, _ttl_s(part.prompt_cache_breakpoint.ttl, path) or usual_s))
    return found[-MAX_BREAKPOINTS:]


def cache_policy(options: PromptCacheOptions | None, pins: Sequence[Pin] = ()) -> CachePolicy:
    """What the engine is told.

    Raises:
        InvalidRequestError: The ttl is not among those that there are.
    """
    if options is not None:
        _ttl_s(options.ttl, "prompt_cache_options.ttl")
        if options.mode == "explicit" and not pins:
            return CachePolicy(is_used=False)
    return CachePolicy(pins=tuple(pins))


async def find_pins(
    messages: Sequence[Message],
    breakpoints: Sequence[Breakpoint],
    token_ids: Sequence[int],
    encode: Callable[[list[Message]], Awaitable[list[int]]],
    num_cut: int,
) -> list[Pin]:
    """Where the breakpoints are among the prompt's ids.

    A template may put a part anywhere, so each is found by changing what follows it and seeing where the ids differ.

    Args:
        encode: Makes a prompt of messages in the same way.
        num_cut: Ids that are left out at the beginning of the prompt.
    """
    pins = []
    for breakpoint_ in breakpoints:
        other_ids = await encode(_changed_behind(messages, breakpoint_))
        pairs = enumerate(zip(token_ids, other_ids, strict=False))
        num_tokens = next((i for i, (ours, other) in pairs if ours != other), min(len(token_ids), len(other_ids)))
        pins.append(Pin(max(0, num_tokens - num_cut), breakpoint_.ttl_s))
    return pins


def _changed_behind(messages: Sequence[Message], breakpoint_: Breakpoint) -> list[Message]:
    changed = list(messages)
    message = messages[breakpoint_.message]
    assert isinstance(message.content, list)
    parts = list(message.content)
    part = parts[breakpoint_.part]
    name = "text" if part.text is not None else "refusal"
    parts[breakpoint_.part] = part.model_copy(update={name: (getattr(part, name) or "") + _OTHER_CHAR})
    changed[breakpoint_.message] = message.model_copy(update={"content": parts})
    return changed


def _ttl_s(ttl: str | None, path: str) -> float | None:
    """Seconds; None when there is no ttl."""
    if ttl is not None and ttl not in TTLS_S:
        raise InvalidRequestError(f"{path} must be one of {', '.join(TTLS_S)}, got {shown(ttl)}", param=path)
    return None if ttl is None else TTLS_S[ttl]
