"""Real chat templates render as transformers' `apply_chat_template`, or say the same in another way.

The templates are those that llama.cpp's package carries and those of real tokenizers. A conversation may be written in
several forms for transformers: content empty or null, arguments as object or text, parts or a string. Weft chooses one
itself, so its prompt must be one of what transformers makes of them. Where none of these shows everything, Weft says
the conversation in another way, and the prompt must show everything.
"""

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from weft.server.text.chat_template import ChatTemplate, ChatTemplateError
from weft.server.text.conversation_repairs import shows_all, tools_told
from weft.server.text.template_renderer import TemplateRenderer

pytestmark = pytest.mark.real

_FOLDER = Path(os.environ.get("WEFT_REAL") or "~/.cache/weft-real").expanduser()
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_NAMES_OF_TOOLS = ("functions", "xml_tools", "datetime")
"""Variables under which a few templates want the tools or the day; what they make of them is not compared here."""


def _sources() -> dict[str, str]:
    found = {str(file.relative_to(_FOLDER)): file.read_text() for file in sorted(_FOLDER.rglob("*.jinja"))}
    for file in sorted(_FOLDER.rglob("tokenizer_config.json")):
        if isinstance(source := json.loads(file.read_text()).get("chat_template"), str):
            found[str(file.relative_to(_FOLDER))] = source
    return found


_SOURCES = _sources()


def _said(role: str, content: object, **more: object) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _call(number: int, value: object = "Oslo") -> dict[str, Any]:
    function = {"name": f"get_weather{number}", "arguments": {"city": value}}
    return {"id": f"abcdefgh{number}", "type": "function", "function": function}


def _result(number: int, content: object = "3 degrees") -> dict[str, Any]:
    return _said("tool", content, tool_call_id=f"abcdefgh{number}", name=f"get_weather{number}")


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"get_weather{number}",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "A city."}},
                "required": ["city"],
            },
        },
    }
    for number in (1, 2)
]
_S, _U, _A = _said("system", "Be brief."), _said("user", "Weather in Oslo?"), _said("assistant", "Cold.")
_LATER, _MORE = _said("system", "Be long."), _said("user", "And Rome?")
_C1 = _said("assistant", None, tool_calls=[_call(1)])
_C12 = _said("assistant", None, tool_calls=[_call(1), _call(2, "Rome")])
_CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [_U],
    "three": [_U, _A, _MORE],
    "system": [_S, _U],
    "system, three": [_S, _U, _A, _MORE],
    "two systems": [_S, _LATER, _U],
    "system in the middle": [_S, _U, _A, _LATER, _MORE],
    "system late alone": [_U, _A, _LATER, _MORE],
    "system last": [_U, _LATER],
    "system alone": [_S],
    "system after an answer": [_U, _A, _LATER],
    "developer": [_said("developer", "Be brief."), _U],
    "developer late": [_S, _U, _A, _said("developer", "Be long."), _MORE],
    "users in a row": [_U, _MORE],
    "answers in a row": [_U, _A, _said("assistant", "Very."), _MORE],
    "answer first": [_A, _MORE],
    "system, answer first": [_S, _A, _MORE],
    "answer last": [_U, _A],
    "empty user": [_said("user", "")],
    "empty answer": [_U, _said("assistant", ""), _MORE],
    "spaces": [_said("user", "  a\n\n b  ")],
    "parts": [_said("user", [{"type": "text", "text": "Weather in Oslo?"}])],
    "reasoning": [_U, _said("assistant", "Cold.", reasoning_content="It is winter."), _MORE],
    "reasoning in the text": [_U, _said("assistant", "<think>\nWinter.\n</think>\n\nCold."), _MORE],
    "names": [_said("user", "Weather in Oslo?", name="Ann"), _A, _said("user", "And Rome?", name="Bob")],
    "call": [_U, _C1, _result(1)],
    "call, answered": [_S, _U, _C1, _result(1), _A, _MORE],
    "call beside text": [_U, _said("assistant", "Let me see.", tool_calls=[_call(1)]), _result(1)],
    "call, then the user": [_U, _C1, _result(1), _MORE],
    "parallel calls": [_U, _C12, _result(1), _result(2, "20 degrees")],
    "results out of order": [_U, _C12, _result(2, "20 degrees"), _result(1)],
    "calls in a row": [_U, _C1, _result(1), _said("assistant", None, tool_calls=[_call(2)]), _result(2)],
    "empty result": [_U, _C1, _result(1, "")],
    "system behind a result": [_S, _U, _C1, _result(1), _LATER],
    "result without a call": [_U, _result(1), _MORE],
}


def _written(turn: dict[str, Any], is_null: bool, is_json: bool, has_parts: bool) -> dict[str, Any]:
    """A turn in one of the forms that people write for transformers."""
    turn = dict(turn)
    if turn["content"] is None:
        turn["content"] = None if is_null else ""
    if isinstance(turn["content"], list):
        turn["content"] = "\n".join(part["text"] for part in turn["content"])
    if has_parts and turn["content"] is not None:
        turn["content"] = [{"type": "text", "text": turn["content"]}]
    if reasoning := turn.get("reasoning_content"):
        turn["thinking"] = turn["reasoning"] = reasoning
    if is_json and "tool_calls" in turn:
        calls = [(call, call["function"]) for call in turn["tool_calls"]]
        turn["tool_calls"] = [
            {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
            for call, function in calls
        ]
    return turn


def _references(
    source: str, messages: list[dict[str, Any]], tools: list[Any] | None, *, has_parts: bool = False
) -> list[str]:
    """What transformers makes of each form, where it makes something that shows everything."""
    found = []
    for is_null, is_json in product((False, True), repeat=2):
        written = [_written(turn, is_null, is_json, has_parts) for turn in messages]
        if "developer" not in source:
            written = [turn | {"role": "system"} if turn["role"] == "developer" else turn for turn in written]
        for no_tools in (None, []):
            try:
                rendered, _ = render_jinja_template(
                    [written], tools=tools or no_tools, chat_template=source, add_generation_prompt=True, **_TOKENS
                )
            except Exception:  # templates raise what they like
                continue
            found += [text for text in rendered if shows_all(text, messages)]
    return found


def _plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As the reader of messages hands them on."""
    return [_written(turn, True, False, False) for turn in messages]


@pytest.mark.skipif(not _SOURCES, reason=f"no chat templates in {_FOLDER}; `make real` fetches them")
@pytest.mark.parametrize("name", _SOURCES)
def test_conversations_render_as_in_transformers(name: str) -> None:
    source = _SOURCES[name]
    template, wrong = ChatTemplate(source), list[str]()
    has_parts = not _references(source, [_U], None)
    can_show_tools = bool(_references(source, [_U], _TOOLS, has_parts=has_parts))
    if template.variables & set(_NAMES_OF_TOOLS):
        pytest.skip("its tools have another name")
    for title, conversation in _CONVERSATIONS.items():
        has_tools = any(turn["role"] == "tool" or turn.get("tool_calls") for turn in conversation)
        messages, tools = _plain(conversation), _TOOLS if has_tools and can_show_tools else None
        shown_tools = tools
        if tools and not TemplateRenderer(source).forms.shows_tools:
            messages, shown_tools = tools_told(messages, tools), None
        expected = _references(source, messages, shown_tools, has_parts=has_parts)
        try:
            prompt = template.render(_plain(conversation), True, {**_TOKENS, "tools": tools})
        except ChatTemplateError as error:
            wrong.append(f"{title}: {error}")
            continue
        if (expected and prompt not in expected) or not shows_all(prompt, messages):
            wrong.append(f"{title}: {prompt}")
    assert not wrong, "\n".join(wrong)
