"""Every pattern that is applied to text of clients or models takes linear time, and so does what converts bodies."""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.linear_time import assert_linear
from weft import server
from weft.server.apis.anthropic.body import count_conversation
from weft.server.apis.anthropic.schema import CountTokensBody
from weft.server.apis.ollama.body import OllamaChatBody, chat_of
from weft.server.apis.responses.input import InputItem, input_messages
from weft.server.apis.responses.schema import ResponseItem
from weft.server.formats import grammar as lark
from weft.server.formats.harmony import HARMONY
from weft.server.formats.json_calls import HERMES
from weft.server.formats.parser import Tool, ToolFormat
from weft.server.formats.pythonic_calls import PYTHONIC
from weft.server.sampling import GenerationDefaults
from weft.server.task.bodies import ChatCompletionBody
from weft.server.task.messages import template_messages
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
        if not module.name.startswith(("weft.server.cli", "weft.server.demo", "weft.server.ray")):
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


TEXT = "x" * 500
TURNS: dict[str, Callable[[int], list[Any]]] = {
    "texts": lambda n: [{"role": "user", "content": [{"type": "text", "text": TEXT}] * n}],
    "answers": lambda n: [{"role": "assistant", "content": [{"type": "text", "text": TEXT}] * n}],
    "thoughts": lambda n: [{"role": "assistant", "content": [{"type": "thinking", "thinking": TEXT}] * n}],
    "turns": lambda n: [{"role": role, "content": TEXT} for role in ("user", "assistant")] * (n // 2),
}
ITEMS: dict[str, dict[str, Any]] = {
    "texts": {"role": "user", "content": TEXT},
    "reasoning": {"type": "reasoning", "content": [{"type": "reasoning_text", "text": TEXT}]},
    "summaries": {"type": "reasoning", "summary": [{"type": "summary_text", "text": TEXT}]},
    "calls": {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
}


def read_anthropic(turns: list[Any]) -> object:
    return count_conversation(CountTokensBody(model="m", messages=turns), strict=False)


def read_items(items: list[Any]) -> object:
    given = [InputItem(ResponseItem.model_validate(item), f"input[{i}]") for i, item in enumerate(items)]
    return input_messages(given, None, HERMES, None, shows_old_reasoning=True, unseal=lambda _, text: text)


def read_ollama(turns: list[Any]) -> object:
    return chat_of(OllamaChatBody(model="m", messages=turns), GenerationDefaults())


def ollama_calls(n: int) -> list[Any]:
    calls = [{"role": "assistant", "tool_calls": [{"function": {"name": f"f{i}", "arguments": {}}} for i in range(n)]}]
    return [*calls, *({"role": "tool", "tool_name": f"f{i}", "content": "1"} for i in reversed(range(n)))]


def read_chat(turns: list[Any]) -> object:
    return template_messages(ChatCompletionBody(messages=turns).messages, HERMES)


@pytest.mark.parametrize(
    ("read", "turns"),
    [
        *((read_anthropic, turns) for turns in TURNS.values()),
        *((read_items, lambda n, item=item: [item] * n) for item in ITEMS.values()),
        *((read_chat, TURNS[name]) for name in ("texts", "answers", "turns")),
        (read_ollama, TURNS["turns"]),
        (read_ollama, ollama_calls),
    ],
)
def test_bodies_are_converted_in_linear_time(
    read: Callable[[list[Any]], object], turns: Callable[[int], list[Any]]
) -> None:
    assert_linear(lambda size: read(turns(size)), 8_000)
