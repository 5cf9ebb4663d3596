import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests import chat_templates_for_tests as templates
from tests.tokenizers_for_tests import byte_level, write_checkpoint
from weft.server.formats.json_calls import GRANITE, HERMES, KIMI_K2
from weft.server.formats.parser import Kind, Tool, ToolFormat
from weft.server.formats.pythonic_calls import LFM2, OLMO3, PYTHONIC
from weft.server.text.chat_template import ChatTemplate, ChatTemplateError, TemplateOptions
from weft.server.text.conversation_repairs import shows_all, ways
from weft.server.text.tokenizer import Tokenizer

# In the manner of Qwen 3.5, of Mistral's of 2025, of Llama 3.1, of Mistral Nemo, of LFM 2 and of gpt-oss.
_SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}"
)
_NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + (
    _SYSTEM_FIRST
)
_FIRST_ONLY = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
_LAST_SYSTEM = (
    "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% endfor %}{{ ns.system }}{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
_ALTERNATING = (
    "{% set ns = namespace(i=0) %}{% for m in messages if m.role in ['user', 'assistant'] and not m.tool_calls %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
_NO_EMPTY = "{% for m in messages if not m.content %}{{ raise_exception('no content') }}{% endfor %}" + _ALTERNATING
_CONTENT_OR_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}{% for c in m.tool_calls %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
_FIRST_CALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{% set c = m.tool_calls[0] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}"
)
_NO_CALLS = "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def _chat(text: str) -> list[dict[str, Any]]:
    """Messages as `s:AAA u:BBB a:CCC t1:DDD`; an assistant's calls follow its text, as `a:CCC+f1+g2`."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    messages = []
    for turn in text.split():
        who, _, said = turn.partition(":")
        content, *calls = said.split("+")
        message: dict[str, Any] = {"role": roles[who[0]], "content": content}
        if who[0] == "t":
            message["tool_call_id"] = who[1:]
        if calls:
            made = [{"name": call[0], "arguments": {"x": f"X{call[1:]}"}} for call in calls]
            message["tool_calls"] = [
                {"id": call[1:], "type": "function", "function": each} for call, each in zip(calls, made, strict=True)
            ]
        messages.append(message)
    return messages


@pytest.mark.parametrize(
    ("source", "chat", "prompt"),
    [
        (_SYSTEM_FIRST, "s:AAA u:BBB", "<system>AAA<user>BBB"),
        (_SYSTEM_FIRST, "s:AAA s:BBB u:CCC", "<system>AAA\n\nBBB<user>CCC"),
        (_SYSTEM_FIRST, "s:AAA d:BBB u:CCC", "<system>AAA\n\nBBB<user>CCC"),
        (_SYSTEM_FIRST, "s:A u:B a:C s:D u:E", "<system>A<user>B<assistant>C<user>D\n\nE"),
        (_SYSTEM_FIRST, "u:A a:B s:C s:D u:E", "<user>A<assistant>B<user>C\n\nD\n\nE"),
        (_SYSTEM_FIRST, "u:AAA s:BBB", "<user>AAA\n\nBBB"),
        (_SYSTEM_FIRST, "u:A s:B a:C u:D", "<user>A\n\nB<assistant>C<user>D"),
        (_SYSTEM_FIRST, "u:A a:B s:C a:D", "<user>A<assistant>B<user>C<assistant>D"),
        (_SYSTEM_FIRST, "u:A a:B s:C", "<user>A<assistant>B<user>C"),
        (_SYSTEM_FIRST, "s:A u:B t1:C d:D", "<system>A<user>B<tool>C<user>D"),
        (_FIRST_ONLY, "s:AAA s:BBB u:CCC", "<system>AAA\n\nBBB<user>CCC"),
        (_FIRST_ONLY, "s:AA u:BB a:CC s:DD u:EE", "<system>AA<user>BB<assistant>CC<user>DD\n\nEE"),
        (_LAST_SYSTEM, "s:AA u:BB s:DD u:EE", "AA<user>BB<user>DD\n\nEE"),
        (_NO_SYSTEM, "s:AAA u:BBB", "<user>AAA\n\nBBB"),
        (_NO_SYSTEM, "d:AAA u:BBB a:CCC u:DDD", "<user>AAA\n\nBBB<assistant>CCC<user>DDD"),
        (_NO_SYSTEM, "s:AAA s:BBB u:CCC", "<user>AAA\n\nBBB\n\nCCC"),
        (_NO_SYSTEM, "s:AAA", "<user>AAA"),
        (_NO_SYSTEM, "s:AAA a:BBB u:CCC", "<user>AAA<assistant>BBB<user>CCC"),
        (_ALTERNATING, "u:AAA u:BBB", "<user>AAA\n\nBBB"),
        (_ALTERNATING, "u:AAA a:BBB a:CCC u:DDD u:EEE", "<user>AAA<assistant>BBB\n\nCCC<user>DDD\n\nEEE"),
        (_ALTERNATING, "a:AAA u:BBB", "<user> <assistant>AAA<user>BBB"),
        (_ALTERNATING, "u:A a:+f1 t1:R u:B", '<user>A<assistant>f{"x": "X1"}<tool>R<assistant> <user>B'),
        (_NO_EMPTY, "u:AAA a: u:BBB", "<user>AAA\n\nBBB"),
        (_NO_EMPTY, "u:A a: u:B a:C", "<user>A\n\nB<assistant>C"),
        (_CONTENT_OR_CALLS, "u:A a:TXT+f1 t1:R", '<user>A<assistant>TXT<assistant>f{"x": "X1"}<tool>R'),
        (
            _CONTENT_OR_CALLS,
            "u:A a:+f1+g2 t2:S t1:R u:B",
            '<user>A<assistant>f{"x": "X1"}<tool>R<assistant>g{"x": "X2"}<tool>S<user>B',
        ),
        (
            _CONTENT_OR_CALLS,
            "u:A a:TXT+f1+g2 t1:R t2:S",
            '<user>A<assistant>TXT<assistant>f{"x": "X1"}<tool>R<assistant>g{"x": "X2"}<tool>S',
        ),
        (
            _FIRST_CALL,
            "u:A a:TXT+f1+g2 t1:R t3:T t2:S",
            '<user>A<assistant>TXTf{"x": "X1"}<tool>R<assistant>g{"x": "X2"}<tool>S<tool>T',
        ),
        (
            _NO_CALLS,
            "u:A a:TXT+f1+g2 t1:RRR u:B",
            '<user>A<assistant>TXT\n\n{"name": "f", "arguments": {"x": "X1"}}\n{"name": "g", "arguments": {"x": "X2"}}'
            "<user>RRR<user>B",
        ),
    ],
)
def test_what_a_template_refuses_or_leaves_out_is_said_in_another_way(source: str, chat: str, prompt: str) -> None:
    """Agents put system messages anywhere, and speak beside their calls: sessions ended, or parts of them got lost."""
    assert ChatTemplate(source).render(_chat(chat), True, {}) == prompt


def test_several_repairs_go_together() -> None:
    chat = _chat("s:SYS u:AAA a:+f1 t1:RRR u:BBB")
    prompt = ChatTemplate(templates.GEMMA).render(chat, True, {"bos_token": "<bos>"})
    call = '{"name": "f", "arguments": {"x": "X1"}}'
    turns = ("user\nSYS\n\nAAA", f"model\n{call}", "user\nRRR\n\nBBB")
    shown = "".join(f"<start_of_turn>{turn}<end_of_turn>\n" for turn in turns)
    assert prompt == f"<bos>{shown}<start_of_turn>model\n"


@pytest.mark.parametrize("chat", ["u:A", "s:S u:A a:B u:C", "u:A u:B", "u:A a:+f1 t1:R", "u:A a:TXT+f1+g2 t1:R t2:S"])
def test_what_a_template_shows_is_left_as_it_is(chat: str) -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c | tojson }}]"
        "{% endfor %}{% endfor %}"
    )
    template, messages = ChatTemplate(source), _chat(chat)
    assert template.render(messages, True, {}) == template.render(messages, True, {}, repairs=False)


def test_where_all_fails_the_template_speaks_for_the_messages_as_they_are() -> None:
    source = "{{ raise_exception('no: ' ~ messages | map(attribute='role') | join(',')) }}"
    with pytest.raises(ChatTemplateError, match=r"refuses these messages: no: system,user,user$"):
        ChatTemplate(source).render(_chat("s:A u:B u:C"), True, {})


def test_a_prompt_that_stays_poorer_is_told(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    with caplog.at_level(logging.WARNING):
        assert [template.render(_chat("u:AAA a:BBB"), True, {}) for _ in range(3)] == ["AAA"] * 3
    [record] = caplog.records
    assert "leaves out a part of these messages; the prompt does not show everything" in record.getMessage()


def test_the_log_tells_each_repair_once(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate(_NO_SYSTEM)
    with caplog.at_level(logging.WARNING):
        for chat in ("s:A u:B", "s:C u:D", "u:A s:B u:C", "u:D s:E u:F"):
            template.render(_chat(chat), True, {})
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "System role not supported; system messages are in turns of the user" in told[0]
    assert "must be at the beginning.; later system messages are in turns of the user" in told[1]


@pytest.mark.parametrize(
    "chat", ["s:AA u:BB a:CC s:DD u:EE", "a:AA u:BB u:CC", "s:AA a:BB+f1+g2 t2:DD t1:EE s:FF u:GG"]
)
def test_every_way_keeps_what_was_said_once_and_in_order(chat: str) -> None:
    messages = _chat(chat)
    words = [turn.partition(":")[2].partition("+")[0] for turn in chat.split() if not turn.startswith("t")]
    found = list(ways(messages))
    assert len(found) >= 2
    for done, repaired in found:
        assert done
        text = json.dumps([[message["content"], message.get("tool_calls")] for message in repaired])
        assert [text.count(f"{word}") for word in words] == [1] * len(words), done
        assert [text.index(word) for word in words] == sorted(text.index(word) for word in words), done
        assert all(text.count(each) == ("+" in chat) for each in ("X1", "X2")), done
        assert all(text.count(result) == 1 for result in ("DD", "EE") if result in chat), done
    assert messages == _chat(chat), "what came is not changed"


@pytest.mark.parametrize(
    ("content", "prompt", "is_shown"),
    [
        ("a b", "<a b>", True),
        (" a b\n", "<a b>", True),
        ("", "", True),
        ("a b", "<a>", False),
        ('"a"\n', r"<\"a\">", True),
        ("é", r"<\u00e9>", True),
        ("<think>hm</think>\n\nyes", "<yes>", True),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a-b", True),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a", False),
    ],
)
def test_what_a_prompt_shows(content: object, prompt: str, is_shown: bool) -> None:
    assert shows_all(prompt, [{"role": "assistant", "content": content}]) is is_shown


def test_parts_are_folded_as_parts() -> None:
    messages = _chat("u:A s:B u:C")
    messages[2]["content"] = [{"type": "text", "text": "C"}]
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source).render(messages, True, {}) == "A[B][C]"


def test_reasoning_stays_with_the_calls_when_text_is_apart() -> None:
    """gpt-oss shows the reasoning before a call, and none of a turn without one."""
    calls = [{"function": {"name": "f", "arguments": {}}}]
    turn = {"role": "assistant", "content": "AAA", "reasoning_content": "RRR", "tool_calls": calls}
    repaired = dict(ways([turn]))["text beside calls is a turn before them"]
    assert repaired == [{"role": "assistant", "content": "AAA"}, {**turn, "content": ""}]


_AS_IT_IS = _SYSTEM_FIRST.replace("{{ m.content }}", "{{ m.content }};")
FORMS = [
    (LFM2, '<|tool_call_start|>[f(x="X1", y=True, z=[1, null]), g(x="X2")]<|tool_call_end|>'),
    (GRANITE, '<|tool_call|>[{"name": "f", "arguments": {"x": "X1", "y": true, "z": [1, null]}}, '
              '{"name": "g", "arguments": {"x": "X2"}}]'),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"x": "X1", "y": true, "z": [1, null]}}\n</tool_call>\n'
             '<tool_call>\n{"name": "g", "arguments": {"x": "X2"}}\n</tool_call>'),
    (PYTHONIC, '[f(x="X1", y=True, z=[1, null]), g(x="X2")]'),  # whose markers these models leave out
    (OLMO3, '<function_calls>\nf(x="X1", y=True, z=[1, null])\ng(x="X2")\n</function_calls>'),
]  # fmt: skip


@pytest.mark.parametrize(("format", "written"), FORMS, ids=lambda each: getattr(each, "name", ""))
def test_calls_that_a_template_does_not_show_are_in_the_models_own_form(format: ToolFormat, written: str) -> None:
    """Templates of LFM2 and Granite 3 leave calls to the content; a model of tools saw its own calls as other JSON."""
    messages = _chat("u:A a:TXT+f1+g2 t1:R t2:S")
    messages[1]["tool_calls"][0]["function"]["arguments"] |= {"y": True, "z": [1, None]}
    prompt = ChatTemplate(_AS_IT_IS).render(messages, True, {}, call_texts=format.call_texts)
    assert prompt == f"<user>A;<assistant>TXT\n\n{written};<tool>R;<tool>S;"
    tools = [Tool("f", {"type": "object"}), Tool("g", {"type": "object"})]
    assert [kind for kind, _ in format.parser(tools).feed(written + " ")].count(Kind.CALL) == 2


def test_calls_with_an_id_in_them_have_no_form_of_their_own() -> None:
    assert not KIMI_K2.call_texts


def test_cut_arguments_stay_as_they_were_written() -> None:
    messages = _chat("u:A a:+f1 t1:R")
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"x": "X'
    prompt = ChatTemplate(_AS_IT_IS).render(messages, True, {}, call_texts=LFM2.call_texts)
    assert prompt == '<user>A;<assistant><|tool_call_start|>[f({"x": "X)]<|tool_call_end|>;<tool>R;'


def test_only_the_markers_of_the_form_are_control_tokens() -> None:
    markers = LFM2.markers
    call = {"id": "1", "function": {"name": "f", "arguments": {"x": markers[0]}}}
    chat = [{"role": "user", "content": markers[1]}, {"role": "assistant", "tool_calls": [call]}]
    backend = byte_level(markers)
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), backend, {"chat_template": _AS_IT_IS})
        tokenizer = Tokenizer.load(path)
    tokenizer.call_texts = LFM2.call_texts
    ids = tokenizer.encode_rendered(tokenizer.render_chat(chat, TemplateOptions()))
    assert [tokenizer.decode([id], False) for id in ids if tokenizer.is_special(id)] == list(markers)
