"""Service tiers as classes of priority, and who may go before others.

A lower number is served earlier, `priority` orders within a tier. What goes before the requests of others, the tier
`priority` and negative values of `priority`, is for the keys of the setting `priority_keys`. Who may not is served in
the tier `default`, as OpenAI does it, and the answer says so; a negative `priority`, of which no answer would speak, is
refused.
"""

from dataclasses import dataclass

from starlette.requests import Request

from weft.engine.shared.messages import TIER_WIDTH
from weft.server.errors import InvalidRequestError
from weft.server.schemas.common import GenerationBody
from weft.server.settings import EVERYBODY, Settings

_CLASSES = {"priority": -1, "default": 0, "flex": 1}
_ALIASES = {"auto": "default", "scale": "default", "fast": "priority"}


@dataclass(frozen=True, slots=True)
class Service:
    """How a request is served: the tier, as the answer says it, and what the engine orders by."""

    tier: str
    priority: int


def service_of(request: Request, body: GenerationBody, settings: Settings) -> Service:
    """Decide how a request is served; values of `priority` lie within 31 bits and a sign.

    Raises:
        InvalidRequestError: A negative `priority` without permission.
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
    return Service(tier, _CLASSES[tier] * TIER_WIDTH + priority)


def _may_go_first(request: Request, settings: Settings) -> bool:
    if EVERYBODY in settings.priority_keys:
        return True
    key = getattr(request.state, "api_key", None)
    return key is not None and key.encode("latin-1").decode() in settings.priority_keys  # its bytes are UTF-8
