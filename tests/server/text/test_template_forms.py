from typing import Any

import pytest

from weft.server.text.chat_template import ChatTemplate

_CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "n": 1}}}


def _render(source: str, messages: list[dict[str, Any]], **variables: object) -> str:
    return ChatTemplate(source).render(messages, True, variables, repairs=False)


@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize(
    "content",
    [
        "{%- if '</think>' in message.content %}{{ 1 / 0 }}{%- endif %}{{ message.content }}",
        "{{ message['content'] + '' }}",
        "{{ message.content.split('</think>')[-1] }}",
        "{{ message.content | trim }}",
    ],
)
def test_a_turn_of_calls_alone_has_an_empty_content(content: str, message: dict[str, Any]) -> None:
    """Qwen3's template looks for the end of reasoning in every answer: agents failed at their second request."""
    calls = "{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
    source = "{% for message in messages %}[" + content + "]" + calls + "{% endfor %}"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", **message, "tool_calls": [_CALL]}]
    assert _render(source, chat) == '[Hi][]{"city": "Köln", "n": 1}'


def test_a_template_that_tells_calls_by_null_gets_null() -> None:
    """The templates of DeepSeek V3 and R1 show calls only then, their arguments as text."""
    source = (
        "{% for m in messages %}{% if m['content'] is none %}{% for call in m['tool_calls'] %}"
        "{{ '<call>' + call['function']['arguments'] }}{% endfor %}"
        "{% else %}{{ m['content'] + ';' }}{% endif %}{% endfor %}"
    )
    for missing in ({}, {"content": None}):
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", **missing, "tool_calls": [_CALL]}]
        assert _render(source, chat) == 'Hi;<call>{"city": "Köln", "n": 1}'
    assert _render(source, [{"role": "assistant", "content": None}]) == ";"


# In the manner of LLaVA and SmolVLM; Gemma 3 and Llama 4 take both.
_PARTS_ONLY = (
    "{% for m in messages %}{{ bos_token + m.role }}:{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
)
_EITHER = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %};{% endfor %}"
)


def test_a_template_that_wants_parts_gets_parts() -> None:
    """A template that goes through parts shows nothing of a string: the prompt was empty."""
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant"}]
    assert _render(_PARTS_ONLY, messages, bos_token="<s>") == "<s>system:a;<s>user:b;<s>assistant:;"
    assert _render(_EITHER, messages[:2]) == "system:a;user:b;"


def test_a_template_that_wants_arguments_as_text_gets_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": ["é", None]}}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    shown = "{% for m in messages %}{% for c in m.tool_calls %}{{ WHAT }}{% endfor %}{% endfor %}"
    as_text, as_object = "'=' + c.function.arguments", "c.function.arguments | tojson"
    assert _render(shown.replace("WHAT", as_text), messages) == '={"a": ["é", null]}'
    assert _render(shown.replace("WHAT", as_object), messages) == '{"a": ["é", null]}'
    messages[1]["tool_calls"][0]["function"]["arguments"] = "no json"  # type: ignore[index]
    assert _render(shown.replace("WHAT", as_text), messages) == "=no json"


_TURN = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
_ITEMS = "[{% for name, value in c.function.arguments | items %}{{ name }}={{ value }}{% endfor %}]"
_MAPPING = "{% if c.function.arguments is mapping %}" + _ITEMS + "{% endif %}"
_METHOD = "[{% for name, value in c.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}]"
_KEYS = "[{% for name in c.function.arguments %}{{ name }}={{ c.function.arguments[name] }}{% endfor %}]"
_EITHER_WAY = "[{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}" + _ITEMS + "{% endif %}]"


@pytest.mark.parametrize("call", [_ITEMS, _MAPPING, _METHOD, _KEYS])
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"city": "Oslo"}, "[city=Oslo]"),
        ('{"city": "Os', '[arguments={"city": "Os]'),
        ("city: Oslo", "[arguments=city: Oslo]"),
        ('["Oslo"]', '[arguments=["Oslo"]]'),
        (["Oslo"], '[arguments=["Oslo"]]'),
        (12, "[arguments=12]"),
        ("", "[]"),
        (" \n", "[]"),
        (None, "[]"),
        ({}, "[]"),
    ],
)
def test_arguments_that_are_no_object_where_a_template_goes_through_them(
    call: str, arguments: object, shown: str
) -> None:
    """A call that was cut ended the session: every later turn held it, and was refused."""
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    source = _TURN.replace("CALL", call)
    assert _render(source, [{"role": "user", "content": "Hi"}, turn]) == "Hi" + shown


@pytest.mark.parametrize(
    "call", ["[{{ c.function.arguments }}]", "{{ '[' + c.function.arguments + ']' }}", _EITHER_WAY]
)
@pytest.mark.parametrize("arguments", ['{"city": "Os', "city: Oslo", '["Oslo"]', "12", '{"a": 1}{"a": 2}'])
def test_arguments_that_are_no_object_where_a_template_shows_text(call: str, arguments: str) -> None:
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    source = _TURN.replace("CALL", call)
    assert _render(source, [{"role": "user", "content": "Hi"}, turn]) == f"Hi[{arguments}]"


def test_a_template_that_goes_through_the_tools_gets_an_empty_list() -> None:
    """The templates of Hermes and Command R for tools failed on every chat without tools."""
    source = "{% for tool in tools %}{{ tool }};{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert _render(source, [{"role": "user", "content": "Hi"}]) == "Hi"
    assert _render(source, [{"role": "user", "content": "Hi"}], tools=["t"]) == "t;Hi"
    assert _render("{{ tools is none }}{{ messages[0].content }}", [{"role": "user", "content": "Hi"}]) == "TrueHi"


_TOOL = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"city": {"type": "string"}}}}}
_SAID = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def test_a_template_that_shows_no_tools_has_them_in_the_system_message(caplog: pytest.LogCaptureFixture) -> None:
    """Agents worked without their tools on DeepSeek-R1 distills."""
    told = 'You may call these functions:\n{"name": "find", "parameters": {"properties": {"city": {"type": "string"}}}}'
    template, user = ChatTemplate(_SAID), {"role": "user", "content": "a"}
    assert template.render([user], True, {"tools": [_TOOL]}) == f"system:{told};user:a;"
    system = {"role": "system", "content": "Be brief."}
    assert template.render([system, user], True, {"tools": [_TOOL]}) == f"system:Be brief.\n\n{told};user:a;"
    assert template.render([user], True, {}) == template.render([user], True, {"tools": []}) == "user:a;"
    assert template.render([user], True, {"tools": [_TOOL]}, repairs=False) == "user:a;"
    assert caplog.text.count("shows no tools") == 1


@pytest.mark.parametrize(
    "tools",
    [
        "{% if tools %}{{ tools[0].function.name }}{% endif %}",
        "{% if tools and messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}",
        "{% if xml_tools %}{{ xml_tools[0].function.name }}{% endif %}",
    ],
)
def test_a_template_that_shows_tools_is_left_alone(tools: str) -> None:
    chat = [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]
    prompt = ChatTemplate(tools + _SAID).render(chat, True, {"tools": [_TOOL]})
    assert prompt.endswith("system:b;user:a;") and "find" in prompt


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ bos_token + messages[0].content }}", "a"),
        ("{{ functions + messages[0].content }}", "[]a"),
        ("{{ tools | length }}{{ messages[0].content }}", "0a"),
    ],
)
def test_what_is_missing_is_blank_where_a_template_joins_it(source: str, shown: str) -> None:
    assert _render(source, [{"role": "user", "content": "a"}]) == shown


def test_a_tool_may_have_no_descriptions() -> None:
    """As those of MCP servers. The templates of gpt-oss and Command R+ join them to text."""
    source = (
        "{% for tool in tools %}{{ tool.function.name + '|' + tool.function.description }}"
        "{% for name, each in tool.function.parameters.properties.items() %}{{ name + '|' + each.description }}"
        "{% endfor %}{% endfor %};" + _SAID
    )
    chat = [{"role": "user", "content": "a"}]
    assert _render(source, chat, tools=[_TOOL]) == "find|city|;user:a;"
    described = {"type": "function", "function": {**_TOOL["function"], "description": "Finds."}}  # type: ignore[dict-item]
    assert _render(source, chat, tools=[described]) == "find|Finds.city|;user:a;"


def test_a_template_may_change_lists_but_not_those_of_others() -> None:
    """In llama.cpp's templates for Kimi K2, which transformers refuses."""
    source = "{% set kept = [] %}{% for m in messages %}{{ kept.append(m.content) or '' }}{% endfor %}"
    source += "{{ kept | join('+') }}{{ messages.pop() and '' }}{{ messages[0].content.append('c') or '' }}"
    chat: list[dict[str, Any]] = [{"role": "user", "content": ["a"]}, {"role": "user", "content": "b"}]
    template = ChatTemplate(source)
    for _ in range(2):
        assert template.render(chat, True, {}, repairs=False) == "['a']+b"
    assert chat == [{"role": "user", "content": ["a"]}, {"role": "user", "content": "b"}]


def test_what_a_filter_yields_can_be_written_as_json() -> None:
    source = "{{ messages | map(attribute='content') | tojson }}{{ messages[0].content }}"
    assert _render(source, [{"role": "user", "content": "a"}]) == '["a"]a'
