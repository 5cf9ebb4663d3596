"""Service tiers as classes of priority: a lower number is served earlier, `priority` orders within a class."""

_CLASSES = {"priority": -1, "default": 0, "flex": 1}
_ALIASES = {"auto": "default", "scale": "default", "fast": "priority"}
_CLASS_WIDTH = 1 << 32
"""More than any two values of `priority` can differ by, so that no class reaches into another."""


def tier_used(service_tier: str | None) -> str:
    """The tier that a request is served in, as the answer says it."""
    return _ALIASES.get(service_tier or "auto", service_tier or "")


def engine_priority(service_tier: str | None, priority: int | None) -> int:
    """What the engine orders by; `priority` lies within 31 bits and a sign."""
    return _CLASSES[tier_used(service_tier)] * _CLASS_WIDTH + (priority or 0)
