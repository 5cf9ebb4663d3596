"""Which modules a rule of a checkpoint is for: names, classes and regular expressions as quantizers write them."""

import re
from typing import Protocol

from pydantic_core import SchemaError, SchemaValidator, core_schema

from weft.engine.fields import Fields

EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings)$")
HEAD = re.compile(r"(^|\.)(lm_head|embed_out)$")

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
    """Compile a regular expression of a checkpoint, which is matched with the names of its modules.

    It comes from anybody, and Python's matcher tries every way: `(a+)+b` never ends. So another one matches, which
    reads each character once. It has no look-around; a pattern with that must be so simple that Python's is quick, too.

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


def pattern_in(fields: Fields, name: str, text: str) -> ModulePattern:
    """The pattern that is in a field; raises ModelError."""
    try:
        return module_pattern(text)
    except (re.error, RecursionError, OverflowError):
        raise fields.wrong(name, "made of regular expressions that take little time") from None


def target_of(group: Fields, target: str, field: str = "targets") -> tuple[int, ModulePattern]:
    """How closely a target names modules, closest first, and their pattern; a name of a class fits all of them."""
    if target.startswith("re:"):
        return 1, pattern_in(group, field, target.removeprefix("re:"))
    if "." in target or target.islower():
        return 0, re.compile(re.escape(target) + "$")
    return 2 if target == "Linear" else 3, re.compile("")


def listed_in(config: Fields, *names: str) -> tuple[re.Pattern[str], ...]:
    """Of the modules that a field lists, and of embeddings, which these formats never quantize."""
    listed = [module for name in names for module in config.texts(name)]
    return *(re.compile(rf"(^|\.){re.escape(module)}(\.|$)") for module in listed), EMBEDDINGS
