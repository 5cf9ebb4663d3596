"""What templates that are made up here show of themselves, and which formats are found by it."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from weft.server.formats import detection as trial
from weft.server.formats import reasoning
from weft.server.formats.detection import (
    NOT_SHOWN,
    TOOL_FORMATS,
    UNKNOWN,
    OutputFormats,
    choose_formats,
    reading_format,
    shown_reasoning,
    shows_tools,
)
from weft.server.text.chat_template import ChatTemplate

_TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_HERMES = (
    "{% for c in m.tool_calls %}<tool_call>\n"
    """{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}"""
    "\n</tool_call>{% endfor %}"
)
_LIST = _HERMES.replace("<tool_call>\n", "<tool_call>[").replace("\n</tool_call>", "]")
_OWN = "{% for c in m.tool_calls %}CALL {{ c.function.name }} WITH {{ c.function.arguments | tojson }}{% endfor %}"
_ONE = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
_END = "{% endfor %}"


def _render(template: str) -> Any:
    compiled = ChatTemplate(template)

    def render(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, object]], has_prompt: bool) -> str:
        return compiled.render(messages, has_prompt, {"tools": list(tools)} if tools else {}, repairs=False)

    return render


def _formats(template: str, tool_format: str = "auto") -> OutputFormats:
    return choose_formats(template, tool_format, lambda _: None, _render(template))


@pytest.mark.parametrize(
    ("template", "shows"),
    [
        (_TURNS + _END, False),
        (_TOOLS + _TURNS + _END, True),
        ("{% if messages[0].role == 'system' %}" + _TOOLS + "{% endif %}" + _TURNS + _END, True),
        ("{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + _TURNS + _END, True),
        ("{% if tools %}{{ raise_exception('no') }}{% endif %}" + _TURNS + _END, True),
        ("{% if xml_tools %}{{ xml_tools | tojson }}{% endif %}" + _TURNS + _END, True),
        ("{% if functions is defined %}{{ functions + datetime }}{% endif %}" + _TURNS + _END, True),
        ("{% if tools and messages | length > 9 %}tools{% endif %}" + _TURNS + _END, False),
    ],
)
def test_templates_that_look_at_tools(template: str, shows: bool) -> None:
    """Some show tools beside a system message only, some under another name, some fail where there are none."""
    assert shows_tools(_render(template)) is shows


@pytest.mark.parametrize(
    ("calls", "name"),
    [
        (_HERMES, "hermes"),
        (_LIST, "granite"),
        (_ONE + _HERMES, "hermes"),
        (_HERMES.replace("tool_call>", "tool_calls>"), "minimax_m1"),
        (_HERMES.replace("<tool_call>\n", "[TOOL_CALLS][").replace("\n</tool_call>", "]"), "mistral"),
    ],
)
def test_the_format_that_leaves_least_as_content_is_found(calls: str, name: str) -> None:
    """Granite's parser reads what Hermes writes, too, but for the tag behind it."""
    formats = _formats(_TOOLS + _TURNS + calls + _END)
    assert formats.tools is not None
    assert formats.tools.name == name
    assert not formats.no_tools


def test_words_of_a_format_do_not_make_it_that_format() -> None:
    """MiniMax M3 and others were taken for another family, whose words their templates hold."""
    template = "Never write <tool_call> nor </tool_call> arguments." + _TOOLS + _TURNS + _OWN + _END
    formats = _formats(template)
    assert (formats.tools, formats.no_tools) == (None, UNKNOWN)
    assert reading_format(_render(template), TOOL_FORMATS) == (None, True)


def test_tools_without_known_calls_are_not_a_model_without_tools(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert _formats(_TOOLS + _TURNS + _END).no_tools == UNKNOWN
        assert _formats(_TURNS + _END).no_tools == NOT_SHOWN
        named = _formats(_TOOLS + _TURNS + _OWN + _END, "hermes")
    assert named.tools is not None
    assert (named.tools.name, named.no_tools) == ("hermes", "")
    lines = [line for line in caplog.messages if line.startswith("tool calls")]
    assert [line.partition(";")[0] for line in lines] == [
        "tool calls: not known, --tool-format names one",
        "tool calls: none",
        "tool calls: hermes",
    ]


def test_the_source_decides_where_no_call_is_written() -> None:
    """LFM2 and Granite 3.3 leave out the calls of earlier answers."""
    formats = _formats("<|tool_list_start|>" + _TOOLS + _TURNS + _END)
    assert formats.tools is not None
    assert formats.tools.name == "lfm2"


def test_calls_are_read_where_tools_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    """DeepSeek V3.1 wants its tools in the system message, and the caller has to put them there."""
    formats = _formats(_TURNS + _HERMES + _END)
    assert formats.tools is not None
    assert formats.tools.name == "hermes"
    assert any("does not show tools" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("around", "name"),
    [
        ("<think>{}</think>{{{{ m.content }}}}", "think"),
        ("<think>\n{}\n</think>\n\n{{{{ m.content }}}}", "think"),
        ("<think>{}</think><response>{{{{ m.content }}}}</response>", "ernie"),
        ("<think>{}</think><answer>{{{{ m.content }}}}</answer>", "hunyuan"),
        ("{{{{ '<mm:' + 'think>' }}}}{}{{{{ '</mm:' + 'think>' }}}}", "minimax"),
        ("<|channel>thought\n{}\n<channel|>{{{{ m.content }}}}", "gemma4"),
        ("Reasoning: {}. {{{{ m.content }}}}", None),
        ("{{{{ m.content }}}}", None),
    ],
)
def test_markers_of_reasoning_are_found_where_they_are_written(around: str, name: str | None) -> None:
    """MiniMax M2 writes `<response>` around results of tools, so the word alone does not make it Ernie."""
    shown = around.format("{{ m.reasoning_content }}")
    turns = "{% for m in messages %}[{{ m.role }}]"
    template = (
        f"<response>{turns}{{% if m.reasoning_content %}}{shown}{{% else %}}{{{{ m.content }}}}{{% endif %}}{_END}"
    )
    found = shown_reasoning(_render(template), template, reasoning.ALL)
    assert (found.name if found else None) == name


def test_a_slow_template_is_not_tried_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of chats are rendered, each within its own limit: a start took minutes."""
    monkeypatch.setattr(trial, "MAX_TRIAL_S", 0.05)

    class Slow:
        num_rendered = 0

        def render_chat(self, messages: Any, options: Any) -> list[str]:
            self.num_rendered += 1
            time.sleep(0.03)
            return [str(messages), str(options.variables)]

    tokenizer = Slow()
    formats = choose_formats("{{ messages }}{{ tools }}", "auto", lambda text: None, trial.renderer(tokenizer))  # type: ignore[arg-type]
    assert tokenizer.num_rendered <= 3 and formats.tools is None
