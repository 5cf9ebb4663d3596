"""Regular expressions of a checkpoint, matched with the names of its modules in a time that does not explode.

They come from anybody, and Python's matcher tries every way: `(a+)+b` never ends. So another one matches, which reads
each character once. It has no look-around; a pattern with that must be so simple that Python's is quick, too.
"""

import re
from typing import Protocol

from pydantic_core import SchemaError, SchemaValidator, core_schema

_MAX_CHARS, _MAX_REPEATS, _MAX_CHOICES = 200, 3, 8
"""Of a pattern with look-around. With these bounds and what `_NEVER` refuses, matching a name is quick."""
_NEVER = re.compile(r"\)[*+{?]|\\[1-9]|\(\?P=")
"""Groups that are repeated or referred to."""


class ModulePattern(Protocol):
    """As `re.Pattern`, as far as it is needed."""

    def search(self, string: str, /) -> object:
        """Whether it fits somewhere."""

    def match(self, string: str, /) -> object:
        """Whether it fits at the start."""


class _Linear:
    def __init__(self, text: str) -> None:
        self._anywhere, self._at_start = (
            SchemaValidator(core_schema.str_schema(pattern=each, regex_engine="rust-regex"))
            for each in (text, f"^(?:{text})")
        )

    def search(self, string: str) -> bool:
        return self._anywhere.isinstance_python(string)

    def match(self, string: str) -> bool:
        return self._at_start.isinstance_python(string)


def module_pattern(text: str) -> ModulePattern:
    """Compile a pattern.

    Raises:
        re.error: It is none, or could take for ever.
    """
    try:
        return _Linear(text)
    except SchemaError:
        pattern = re.compile(text)
    repeats, choices = sum(map(text.count, "*+{")), text.count("|")
    if len(text) > _MAX_CHARS or repeats > _MAX_REPEATS or choices > _MAX_CHOICES or _NEVER.search(text):
        raise re.error("it could take for ever")
    return pattern
