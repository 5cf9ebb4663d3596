"""Refuses lone surrogates, which JSON can write but tokenizers, messages and answers cannot hold, in any member."""

import re
from typing import Any

from weft.server.errors import InvalidTypeError
from weft.server.request.validation import dotted_path

_WRITTEN = (b"\\ud", b"\\uD", b"\xed")
"""What lone surrogates begin with; so do characters that are written as pairs of escapes, and some of Korean."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def check_utf8(data: bytes, value: object) -> None:
    """Check the value that was parsed from `data`. It is looked at only if the bytes can hold a lone surrogate.

    Raises:
        InvalidTypeError: There is one; the error names the first place.
    """
    if not any(start in data for start in _WRITTEN):
        return
    places: list[tuple[Any, object]] = [(None, value)]  # each with its step and the place above: paths may be long
    while places:
        at, here = places.pop()
        if isinstance(here, list | dict):
            items = list(here.items() if isinstance(here, dict) else enumerate(here))
            places += [((step, at), inner) for step, inner in reversed(items)]
        for text in (here, at and at[0]):
            if isinstance(text, str) and not text.isascii() and _SURROGATE.search(text):
                path = _path(at).encode("utf-8", "replace").decode()
                raise InvalidTypeError(f"{path}: input should be text without lone surrogates", param=path)


def _path(at: Any) -> str:
    steps: list[str | int] = []
    while at is not None:
        step, at = at
        steps.append(step)
    return dotted_path(steps[::-1])
