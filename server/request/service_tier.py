"""Maps service tiers to priorities, and decides which API keys may go before others.

A lower number is served earlier. `priority` orders requests within a tier. Two values put a request before those of
others: the tier `priority`, and a negative `priority`. Only keys in the setting `priority_keys` may use them. For other
keys, the tier becomes `default`, as OpenAI does it, and the answer says so. A negative `priority` is refused, because
no field of the answer could report the change.
"""

from dataclasses import dataclass

from starlette.requests import Request

from weft.engine.shared.background import BACKGROUND
from weft.engine.shared.messages import TIER_WIDTH
from weft.server.errors import InvalidRequestError
from weft.server.http.auth import is_of_batch
from weft.server.schemas.common import GenerationBody
from weft.server.settings import EVERYBODY, Settings

_CLASSES = {"priority": -1, "default": 0, "flex": 1}
_ALIASES = {"auto": "default", "scale": "default", "fast": "priority"}


@dataclass(frozen=True, slots=True)
class Service:
    """How a request is served: the tier that the answer reports, and the priority that the engine orders by."""

    tier: str
    priority: int


def service_of(request: Request, body: GenerationBody, settings: Settings) -> Service:
    """Decide how a request is served. `priority` is limited to 31 bits and a sign.

    Raises:
        InvalidRequestError: `priority` is negative, and the API key may not go first.
    """
    may_go_first = _may_go_first(request, settings)
    priority = body.priority or 0
    if priority < 0 and not may_go_first:
        message = f"priority must be at least 0 unless the API key is among priority_keys, got {priority}"
        raise InvalidRequestError(message, param="priority")
    asked = body.service_tier or "auto"
    tier = _ALIASES.get(asked, asked)
    if tier == "priority" and not may_go_first:
        tier = "default"
    if is_of_batch(request):
        return Service("default", BACKGROUND + max(priority, 0))
    return Service(tier, _CLASSES[tier] * TIER_WIDTH + priority)


def _may_go_first(request: Request, settings: Settings) -> bool:
    if EVERYBODY in settings.priority_keys:
        return True
    key = getattr(request.state, "api_key", None)
    return key is not None and key.encode("latin-1").decode() in settings.priority_keys  # the key's bytes are UTF-8
