"""Tables of plain text: rows in columns, and the settings for `weft config`, the help of flags and docs/settings.md.

Invariant: no secret is ever shown.
"""

from collections.abc import Sequence

from weft.server.resolve import Resolved
from weft.server.settings import FLAGS, SECRETS, SIZES, Settings, flag_name


def align(rows: Sequence[Sequence[str]]) -> str:
    """One line per row; every column but the last is as wide as its widest cell. All rows have as many cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


_SCHEMA = Settings.model_json_schema()["properties"]
_WORDS = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true, false",
    "array": "names",
    "object": "mapping",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<="}


def describe(resolved: Resolved) -> str:
    """One line per setting: name, value and the origin of the value. API keys are counted, not shown."""
    rows = []
    for name, origin in resolved.origins.items():
        value = getattr(resolved.settings, name)
        shown = f"{len(value)} set, not shown" if name in SECRETS and value else _show(name, value)
        rows.append((name, shown, origin))
    return align(rows)


def render_table() -> str:
    """The settings table of docs/settings.md, in Markdown."""
    lines = ["| setting | flag | values | default | meaning |", "|---|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        flag = "MODEL" if name == "model" else f"`{flag_name(name)}`" if name in FLAGS else ""
        default = _show(name, field.default)
        lines.append(f"| `{name}` | {flag} | {describe_values(name)} | {default} | {field.description} |")
    return "\n".join(lines) + "\n"


def describe_values(name: str) -> str:
    """The values that a setting takes: its choices, or its type and bounds."""
    if name in SIZES:
        return "size"
    schema = _SCHEMA[name]
    schema = schema.get("anyOf", [schema])[0]  # the first of "or null"
    if "enum" in schema:
        return ", ".join(schema["enum"])
    bounds = ", ".join(f"{sign} {schema[key]:g}" for key, sign in _BOUNDS.items() if key in schema)
    return f"{_WORDS[schema['type']]} {bounds}".strip()


def _show(name: str, value: object) -> str:
    if name in SIZES and isinstance(value, int):
        return _format_size(value)
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}={choice}" for key, choice in value.items()) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def _format_size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)
