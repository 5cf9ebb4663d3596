"""`prompt_cache_options` and `prompt_cache_breakpoint`: how a request uses the prefix cache.

In mode implicit, blocks are shared by content automatically. In mode explicit, a request without a breakpoint neither
reads nor writes the cache. In both modes, a breakpoint pins the prompt up to the end of its part for a limited time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.engine.shared.messages import Pin
from weft.server.errors import InvalidRequestError, shown
from weft.server.request.messages import PART_SEPARATOR
from weft.server.schemas.chat_completions import CacheBreakpoint, Message
from weft.server.schemas.common import PromptCacheOptions

TTLS_S = {"30m": 1800.0, "12h": 43200.0}
DEFAULT_TTL = "30m"
MAX_BREAKPOINTS = 4
"""If there are more, the last ones count."""

_MARKS = "\U0010fffa\U0010fffb\U0010fffc\U0010fffd"
"""One character for each breakpoint, used in this file only. They have no meaning to templates and tokenizers."""
_WITHOUT_MARKS = dict.fromkeys(map(ord, _MARKS))


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The end of a part: its message, characters of content up to it, and how long the prompt up to it is kept."""

    message: int
    num_chars: int
    ttl_s: float


def find_breakpoints(messages: Sequence[Message], options: PromptCacheOptions | None) -> list[Breakpoint]:
    """The last breakpoints, in order.

    Raises:
        InvalidRequestError: A ttl is not one of the known ones.
    """
    usual_s = usual_ttl_s(options)
    found = []
    for i, message in enumerate(messages):
        num_chars = 0
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            num_chars += len((part.text if part.type == "text" else part.refusal) or "")
            if part.prompt_cache_breakpoint is not None:
                at = f"messages[{i}].content[{j}]"
                found.append(breakpoint_at(i, num_chars, part.prompt_cache_breakpoint, usual_s, at))
            num_chars += len(PART_SEPARATOR)
    return found[-MAX_BREAKPOINTS:]


def usual_ttl_s(options: PromptCacheOptions | None) -> float:
    """How long a breakpoint without a ttl of its own lasts."""
    return _ttl_s(options.ttl if options else None, "prompt_cache_options.ttl") or TTLS_S[DEFAULT_TTL]


def breakpoint_at(message: int, num_chars: int, given: CacheBreakpoint, usual_s: float, at: str) -> Breakpoint:
    """The breakpoint of the part at the path `at`, which ends after so many characters of the message's content."""
    return Breakpoint(message, num_chars, _ttl_s(given.ttl, f"{at}.prompt_cache_breakpoint.ttl") or usual_s)


def uses_cache(options: PromptCacheOptions | None) -> bool:
    """Whether the cache is used even without a breakpoint.

    Raises:
        InvalidRequestError: The ttl is not one of the known ones.
    """
    if options is None:
        return True
    _ttl_s(options.ttl, "prompt_cache_options.ttl")
    return options.mode != "explicit"


def marked(messages: Sequence[dict[str, Any]], breakpoints: Sequence[Breakpoint]) -> list[dict[str, Any]]:
    """The messages with a mark at each breakpoint, in front of white space there, which a template may strip."""
    result = list(messages)
    for mark, at in reversed([*zip(_MARKS, breakpoints, strict=False)]):  # last first: earlier positions stay valid
        message = result[at.message]
        content = message["content"]
        end = len(content[: at.num_chars].rstrip())
        result[at.message] = {**message, "content": content[:end] + mark + content[end:]}
    return result


def find_pins(
    breakpoints: Sequence[Breakpoint],
    token_ids: Sequence[int],
    rendered: Sequence[str],
    encode: Callable[[list[str]], list[int]],
) -> list[Pin]:
    """Find the breakpoints among the prompt's ids.

    The prompt itself is rendered without marks, so that marks cannot change it. A pin covers the ids that both
    renderings share up to the mark. If the template does not show the mark, the pin covers the whole prompt.

    Args:
        rendered: The template's output for the marked messages, in the pieces that `encode` takes.
    """
    pins = []
    for mark, at in zip(_MARKS, breakpoints, strict=False):
        other_ids = encode(_beginning(rendered, mark))
        pairs = enumerate(zip(token_ids, other_ids, strict=False))
        num_common = next((i for i, (ours, other) in pairs if ours != other), min(len(token_ids), len(other_ids)))
        pins.append(Pin(num_common, at.ttl_s))
    return pins


def _beginning(rendered: Sequence[str], mark: str) -> list[str]:
    """The rendered text up to and including a mark, at which its ids begin to differ from the prompt's."""
    pieces: list[str] = []
    for piece in rendered:
        head, found, _ = piece.partition(mark)
        pieces.append(head.translate(_WITHOUT_MARKS) + found)
        if found:
            break
    return pieces


def _ttl_s(ttl: str | None, path: str) -> float | None:
    """The ttl in seconds; None if there is none."""
    if ttl is not None and ttl not in TTLS_S:
        raise InvalidRequestError(f"{path} must be one of {', '.join(TTLS_S)}, got {shown(ttl)}", param=path)
    return None if ttl is None else TTLS_S[ttl]


def cache_salt_of(*parts: str | None) -> str:
    """Combine several salts into one; empty if there are none. Different lists of parts give different salts."""
    given = [f"{len(part)}:{part}" if part else "" for part in parts]
    return ",".join(given) if any(given) else ""
