"""Text that others wrote, made safe for a terminal: nothing in it moves the cursor, rings, or turns text round."""

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def strip_controls(text: str) -> str:
    """Drop control characters but line feed and tab, bidirectional overrides, and halves of surrogate pairs."""
    return _CONTROLS.sub("", text)
