"""Every pattern that is applied to text of clients or models takes linear time."""

import importlib
import pkgutil
import re
from collections.abc import Iterator

import pytest

from tests.linear_time import assert_linear
from weft import server
from weft.server.formats import lark
from weft.server.formats.harmony import HARMONY
from weft.server.formats.json_calls import HERMES
from weft.server.formats.parser import Tool, ToolFormat
from weft.server.formats.pythonic_calls import PYTHONIC
from weft.server.text.shield import Shield

FILLERS = (
    "a",
    " ",
    "\n",
    "=",
    "<",
    "<|",
    " to=",
    "start ",
    "?start",
    "0.",
    '"',
    "\\",
    "/",
    ":",
    "é",
    "a\n",
    "<|channel|> ",
)
TOOL = Tool("f", {"type": "object", "properties": {"a": {}}})
SEARCHED = {"_LARK_START", "_RECIPIENT", "_ANALYSIS", "_SURROGATE"}
"""Patterns that are used with `search`; all others are matched at a given place."""


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    for module in pkgutil.walk_packages(server.__path__, "weft.server."):
        if not module.name.startswith(("weft.server.terminal", "weft.server.demo")):
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, re.Pattern):
                    yield name, value


@pytest.mark.parametrize(("name", "pattern"), [*patterns()])
def test_every_pattern_is_linear(name: str, pattern: re.Pattern[str]) -> None:
    def look(size: int) -> None:
        for filler in FILLERS:
            text = filler * (size // len(filler)) + "\0"
            pattern.match(text)
            pattern.fullmatch(text)
            if name in SEARCHED:
                pattern.search(text)

    assert_linear(look, 200_000)


def test_what_grammars_and_prompts_are_made_of_is_written_in_linear_time() -> None:
    shield = Shield(["<|im_start|>", "<|im_end|>", "<|channel|>", "[INST]"])

    def write(size: int) -> None:
        for filler in FILLERS:
            text = filler * (size // len(filler))
            lark.regex(text)
            lark.json_lexemes(text)
            shield.mark([text])

    assert_linear(write, 200_000)


@pytest.mark.parametrize("opening", ["[f(", "[f(a=", '<tool_call>\n{"name": ', "<|channel|>commentary", ""])
@pytest.mark.parametrize("tool_format", [HERMES, PYTHONIC, HARMONY], ids=lambda tool_format: tool_format.name)
def test_what_a_model_writes_token_by_token_is_read_in_linear_time(tool_format: ToolFormat, opening: str) -> None:
    def read(size: int) -> None:
        for filler in FILLERS:
            parser = tool_format.parser([TOOL])
            for piece in [*opening, *(filler for _ in range(size))]:
                parser.feed(piece)
            parser.finish()

    assert_linear(read, 4_000)
