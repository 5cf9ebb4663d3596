"""Background requests, such as the lines of a batch, compute only in steps in which no other request wants to."""

BACKGROUND = 1 << 36
"""From this priority on, a request is a background request."""


def is_background(priority: int) -> bool:
    """Whether a request of this priority comes after all others, however long it waits."""
    return priority >= BACKGROUND
