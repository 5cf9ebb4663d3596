"""A grammar writes calls as the chat template of the family writes them."""

import json
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from tests.server.formats.family_templates_for_tests import ALL
from tests.tokenizers_for_tests import byte_level
from weft.server.formats.detection import TOOL_FORMATS
from weft.server.formats.parser import AnswerRules, Tool, ToolFormat
from weft.server.text.chat_template import ChatTemplate

TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1},
                "unit": {"enum": ["K", "C"]},
            },
            "required": ["city"],
        },
    ),
    Tool("now", {"type": "object", "properties": {}}),
)
GOOD: tuple[dict[str, Any], ...] = ({"city": "Köln am Rhein"}, {"city": "", "days": 3}, {"city": "<b>", "unit": "C"})
BAD: tuple[dict[str, Any], ...] = ({"days": 3}, {"city": "a", "days": 0}, {"city": "a", "unit": "F"}, {"town": "a"})


def _written(template: ChatTemplate, family: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    ids = family.call_id or "{index:09}"
    asked = [
        {
            "id": ids.format(index=i, name=name),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for i, (name, arguments) in enumerate(calls)
    ]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": asked}]
    rendered = template.render(messages, False, {})
    return rendered.removeprefix(template.render(messages[:1], True, {})).lstrip("\n")


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_grammars_write_calls_as_templates_do(name: str, has_tokens: bool) -> None:
    family = next(format for format in TOOL_FORMATS if format.name == name)
    template = ChatTemplate(ALL[name])
    backend = byte_level(("<|endoftext|>", "<|im_end|>"))
    if has_tokens:
        backend.add_tokens([AddedToken(marker, special=True) for marker in family.markers])
    vocabulary = LLTokenizer(backend.to_str(), eos_token=backend.token_to_id("<|im_end|>"))

    def mark(marker: str) -> str:
        token_id = backend.token_to_id(marker)
        return json.dumps(marker) if token_id is None else f"<[{token_id}]>"

    @cache
    def matcher(is_required: bool, allows_many: bool) -> LLMatcher:
        rules = family.grammar(AnswerRules(TOOLS, mark, None, is_required, allows_many))
        made = LLMatcher(vocabulary, f"start: answer\n{rules}")
        assert not made.is_error(), made.get_error()
        return made

    def takes(text: str, is_required: bool = False, allows_many: bool = True) -> bool:
        ids = backend.encode(text, add_special_tokens=False).ids
        fresh = matcher(is_required, allows_many).deep_copy()
        return fresh.try_consume_tokens(ids) == len(ids) and fresh.is_accepting()

    for arguments in GOOD:
        one = _written(template, family, [("get_weather", arguments)])
        assert takes(one), one
        assert takes(one, is_required=True, allows_many=False), one
        two = _written(template, family, [("get_weather", arguments), ("now", {})])
        assert takes(two, is_required=True), two
        assert not takes(two, is_required=True, allows_many=False), two
    for arguments in BAD:
        assert not takes(_written(template, family, [("get_weather", arguments)]), is_required=True)
    assert takes("It is 3 o'clock.") is not family.reads_all
