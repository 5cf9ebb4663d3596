"""Writes the table of the formats of tool calls and reasoning, with the models that use them."""

from collections.abc import Iterable

from weft.server.formats import reasoning
from weft.server.formats.detection import TOOL_FORMATS


def render_formats() -> str:
    """The table in Markdown."""
    tools = ((f"`{format.name}`", format.models) for format in TOOL_FORMATS)
    blocks = ((f"`{format.begin}` … `{format.end}`".replace("|", r"\|"), format.models) for format in reasoning.ALL)
    return _table("tool format", tools) + "\n" + _table("reasoning between", blocks)


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    return "".join(f"| {first} | {second} |\n" for first, second in ((title, "models"), ("---", "---"), *rows))
