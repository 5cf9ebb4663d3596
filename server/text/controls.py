"""Makes text from others safe for a terminal: it cannot move the cursor, ring the bell or reverse the text."""

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def strip_controls(text: str) -> str:
    """Drop control characters except line feed and tab, bidirectional overrides, and unpaired surrogates."""
    return _CONTROLS.sub("", text)
