"""Lark text for `llguidance`: literals, free text that cannot hide a marker, the JSON arguments of a tool.

Facts these rest on: a string literal is read as JSON; a control token matches no text, free or not, it has to be
named; a lexeme ends where no longer match is left, so free text and a literal behind it must be one lazy lexeme, while
free text and a token may be two. JSON has no freedom of white space: what is constrained looks like what templates
write.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from weft.server.formats.parser import Mark, Tool
from weft.server.formats.schema import guided_schema

_ANY_TEXT = "/(?s:.*)/"
_ANNOTATIONS = {"type", "title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs"}


def literal(text: str) -> str:
    """Exactly this text, which is not empty; matches no control token."""
    return json.dumps(text)


def json_lexemes(text: str) -> str:
    """Exactly this beginning of JSON, in the lexemes of `json_value`, so that either may follow at the same place."""
    return " ".join(map(literal, re.findall(r'"[^"]*"|[^"]+', text)))


def spell(text: str, markers: Sequence[str], mark: Mark) -> str:
    """Exactly this text, with the markers that occur in it marked."""
    for marker in sorted(markers, key=len, reverse=True):
        before, found, after = text.partition(marker)
        if found:
            parts = spell(before, markers, mark), mark(marker), spell(after, markers, mark)
            return " ".join(part for part in parts if part)
    return literal(text) if text else ""


def regex(pattern: str) -> str:
    r"""A regex as it stands in Lark, where a slash ends it: one that is not escaped becomes \/."""
    parts = pattern.split("\\\\")  # what follows an escaped backslash is not escaped itself
    escaped = "\\\\".join(part.replace("\\/", "/").replace("/", "\\/") for part in parts)
    return f"/{escaped}/".replace("\n", "\\n")


def string_of(schema: dict[str, Any]) -> str | None:
    """The expression of a terminal: what pattern and lengths of a JSON schema leave of a string; None: everything."""
    parts = []
    if isinstance(pattern := schema.get("pattern"), str):
        has_end = pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern.removeprefix("^")[: -1 if has_end else None]
        head, tail = ("" if pattern.startswith("^") else "(?s:.*)"), ("" if has_end else "(?s:.*)")
        parts.append(regex(f"{head}(?:{inner}){tail}"))
    if "minLength" in schema or "maxLength" in schema:
        parts.append(f"/(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
    return " & ".join(parts) or None


def text_without(texts: Sequence[str], not_first: str = "", within: str | None = None) -> str:
    """The expression of a terminal: any text, also none, in which nothing of `texts` occurs.

    Args:
        texts: None is empty.
        not_first: The text does not begin with this, nor with white space and this; "" forbids nothing.
        within: The expression of a terminal that the text is to be as well.
    """
    parts = [_ANY_TEXT, within] if within else [_ANY_TEXT]
    if texts:
        parts.append(f"~({_ANY_TEXT} ({' | '.join(map(literal, texts))}) {_ANY_TEXT})")
    if not_first:
        parts.append(f"~(/[ \\t\\r\\n]*/ {literal(not_first)} {_ANY_TEXT})")
    return " & ".join(parts)


def text_up_to(
    rule: str, marker: str, mark: Mark, without: Sequence[str] = (), not_first: str = "", within: str | None = None
) -> str:
    """Define the rule: any text up to the first `marker`, and that marker.

    Spelling the marker with other tokens than its own does not get past it: it is either the end, too, or refused.

    Args:
        rule: Its name, in lower case; the name in upper case and `_TEXT` behind it becomes a terminal.
        marker: What ends the text.
        without: Further texts that may not occur, such as other markers.
        not_first: See `text_without`.

    Returns:
        Two lines.
    """
    marked = mark(marker)
    lazy = "[lazy]" if marked.startswith('"') else ""
    text = f"{rule.upper()}_TEXT"
    expression = text_without(tuple(dict.fromkeys((marker, *without))), not_first, within)
    return f"{rule}{lazy}: {text} {marked}\n{text}: {expression}\n"


def json_value(schema: dict[str, Any], *, is_lenient: bool = False) -> str:
    """A JSON value of the schema, in which `$ref` reaches the schema's own `$defs`; see `guided_schema`."""
    return f"%json {json.dumps(guided_schema(schema, is_lenient=is_lenient))}"


def arguments(tool: Tool) -> str:
    """The JSON object of a tool's arguments; exactly `{}` where its schema speaks of none."""
    if not any(value for key, value in tool.parameters.items() if key not in _ANNOTATIONS):
        return literal("{}")
    return json_value({**tool.parameters, "type": "object"}, is_lenient=not tool.is_strict)
