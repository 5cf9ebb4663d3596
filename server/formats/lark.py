"""Writes Lark for `llguidance`: literals, free text that cannot hide a marker, JSON of a schema.

This relies on three facts. A string literal is read as JSON. A control token matches no text; a rule has to name it.
A lexeme ends where no longer match is left, so free text and a literal after it must be one lazy lexeme, while free
text and a token may be two. JSON has fixed white space, so that constrained output looks like what templates write.
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
    """Exactly this text, which must not be empty; matches no control token."""
    return json.dumps(text)


def json_lexemes(text: str) -> str:
    """Exactly this beginning of JSON, in the lexemes of `json_value`, so that both may stand at the same place."""
    return " ".join(map(literal, re.findall(r'"[^"]*"|[^"]+', text)))


def spell(text: str, markers: Sequence[str], mark: Mark) -> str:
    """Exactly this text, with its markers as `mark` writes them."""
    for marker in sorted(markers, key=len, reverse=True):
        before, found, after = text.partition(marker)
        if found:
            parts = spell(before, markers, mark), mark(marker), spell(after, markers, mark)
            return " ".join(part for part in parts if part)
    return literal(text) if text else ""


def regex(pattern: str) -> str:
    r"""A regex as Lark writes it; a slash would end it, so one that is not escaped becomes \/."""
    parts = pattern.split("\\\\")  # what follows an escaped backslash is not escaped itself
    escaped = "\\\\".join(part.replace("\\/", "/").replace("/", "\\/") for part in parts)
    return f"/{escaped}/".replace("\n", "\\n")


def string_of(schema: dict[str, Any]) -> str | None:
    """The terminal expression for `pattern`, `minLength` and `maxLength` of a JSON schema; None: any string fits."""
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
    """The terminal expression for any text, also an empty one, in which none of `texts` occurs.

    Args:
        texts: No text is empty.
        not_first: The text does not begin with this, nor with white space and this; "" forbids nothing.
        within: A terminal expression that the text must match as well.
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
    """Define a rule and its terminal: any text up to the first `marker`, and that marker.

    A marker that is spelled with other tokens than its own ends the text as well, or is refused.

    Args:
        rule: The rule's name, in lower case; the terminal is the name in upper case and `_TEXT`.
        marker: What ends the text.
        without: More texts that must not occur, such as other markers.
        not_first, within: As in `text_without`.

    Returns:
        Two lines.
    """
    marked = mark(marker)
    lazy = "[lazy]" if marked.startswith('"') else ""
    text = f"{rule.upper()}_TEXT"
    expression = text_without(tuple(dict.fromkeys((marker, *without))), not_first, within)
    return f"{rule}{lazy}: {text} {marked}\n{text}: {expression}\n"


def json_value(schema: dict[str, Any], *, is_lenient: bool = False) -> str:
    """A JSON value of the schema, whose `$ref` point into the schema itself; see `guided_schema`."""
    return f"%json {json.dumps(guided_schema(schema, is_lenient=is_lenient))}"


def member_value(schema: Any, tool: Tool) -> str:
    """A JSON value of a schema inside the tool's, in which `$ref` still reaches the definitions of the tool's."""
    members = schema if isinstance(schema, dict) else {}
    definitions = {key: value for key, value in tool.parameters.items() if key in ("$defs", "definitions")}
    return json_value({**members, **definitions}, is_lenient=not tool.is_strict)


def arguments(tool: Tool) -> str:
    """The JSON object of a tool's arguments; exactly `{}` if the tool's schema declares none."""
    if not any(value for key, value in tool.parameters.items() if key not in _ANNOTATIONS):
        return literal("{}")
    return json_value({**tool.parameters, "type": "object"}, is_lenient=not tool.is_strict)
