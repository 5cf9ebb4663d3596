"""`weft models`: what a running server has, one line per model. Another server than Weft tells only the names."""

import sys
import time

from weft.engine.shared.memory import format_size
from weft.server.cli.chat_client import ChatClient, ChatError
from weft.server.terminal.table import align
from weft.server.text.controls import strip_controls

EXIT_FAILED = 1
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def list_models(url: str, api_key: str | None) -> int:
    """Print name, state, memory and last use of each model of a server. Returns the exit code."""
    try:
        cards = ChatClient(url, api_key).cards()
    except ChatError as error:
        advice = "`weft models --architectures` needs no server and lists what can be served"
        print(f"weft: error: {error}; {advice}", file=sys.stderr)
        return EXIT_FAILED
    now = time.time()
    print(align([("model", "state", "memory", "last use", "adapter of"), *(_describe(card, now) for card in cards)]))
    return 0


def _describe(card: dict[str, object], now: float) -> tuple[str, ...]:
    """The cells of a row, from an entry of GET /v1/models; what it does not tell is a dash."""
    state, num_bytes, last_used = card.get("state"), card.get("memory_bytes"), card.get("last_used", "")
    used = "never" if last_used is None else "-"
    return (
        strip_controls(str(card.get("id"))),
        strip_controls(str(state or "-")),
        format_size(num_bytes) if isinstance(num_bytes, int) else "-",
        _ago(now - last_used) if isinstance(last_used, int | float) else used,
        strip_controls(str(card.get("parent") or "-")),
    )


def _ago(seconds: float) -> str:
    """A duration in its largest unit, such as 3 min ago."""
    unit, length = next((each for each in _UNITS if seconds >= each[1]), _UNITS[-1])
    return f"{max(seconds, 0) // length:.0f} {unit} ago"
