import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests import chat_templates_for_tests as templates
from tests.tokenizers_for_tests import EVERY_SPECIAL, byte_level, encode_chat, sentencepiece, write_checkpoint
from weft.server.text.chat_template import ChatTemplate, ChatTemplateError, ChatTemplates
from weft.server.text.tokenizer import Tokenizer

_SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Wetter für "einen" Ort <b>&',
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Köln", "東京"]}}},
        },
    }
]
_CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "n": 1}}}

_PLAIN: list[dict[str, Any]] = [
    {"role": "user", "content": "  Hello,\n\nwhat is 2 < 3 && é > 1?  "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes. "},
    {"role": "user", "content": "> why"},
]
_CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": _PLAIN,
    "system": [{"role": "system", "content": " You are Weft. "}, *_PLAIN],
    "short": [{"role": "user", "content": "I"}],
    "reasoning": [*_PLAIN, {"role": "assistant", "content": "So.", "reasoning": "because"}],
    "tool": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "content": '{"t": 3}', "tool_call_id": "c1"},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "a <"}, {"type": "x"}, {"type": "text", "text": "b"}]}
    ],
    "empty": [{"role": "user", "content": ""}],
}
_VARIABLES: dict[str, dict[str, Any]] = {
    "none": {},
    "tools": {"tools": _TOOLS},
    "switches": {"enable_thinking": False, "date_string": "1 Jan 2026"},
}


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """The same tokenizer, loaded by Weft and by transformers."""
    backend = byte_level(EVERY_SPECIAL) if request.param == "byte_level" else sentencepiece(EVERY_SPECIAL)
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), backend, dict(_SPECIAL_TOKENS))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **_SPECIAL_TOKENS)
    return Tokenizer.load(folder), reference


def _outcome(function: Any) -> list[int] | str:
    try:
        ids: list[int] = function()
    except Exception:
        return "refused"
    return ids


_OPEN_ENDS = ("Sure, here", " Sure ", "Sure,  ", "<think>\nhm\n</think>\n\nYes. ", "a <|im_end|> b <")


@pytest.mark.parametrize("end", _OPEN_ENDS[:-1])
@pytest.mark.parametrize("template", templates.ALL)
def test_an_open_last_message_ends_as_in_transformers(pair: tuple[Tokenizer, Any], template: str, end: str) -> None:
    ours, reference = pair
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": end}]
    source = templates.ALL[template]
    expected = _outcome(
        lambda: reference.apply_chat_template(
            chat, chat_template=source, continue_final_message=True, return_dict=False
        )
    )
    assert expected == _outcome(
        lambda: encode_chat(ours, chat, add_generation_prompt=False, continue_final_message=True, chat_template=source)
    )


def test_an_open_last_message_cannot_hold_a_control_token(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _OPEN_ENDS[-1]}]
    ids = encode_chat(
        ours, chat, add_generation_prompt=False, continue_final_message=True, chat_template=templates.CHATML
    )
    assert ours.decode(ids, skip_special_tokens=False).endswith("assistant\n" + _OPEN_ENDS[-1])
    assert sum(map(ours.is_special, ids)) == 3


def test_a_template_that_hides_the_last_message_cannot_leave_it_open(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    with pytest.raises(ChatTemplateError, match="does not show the final message"):
        encode_chat(
            ours, [{"role": "user", "content": "a"}], continue_final_message=True, chat_template="{{ messages|length }}"
        )


@pytest.mark.parametrize("content", ["Let me see.", "", None])
def test_a_last_message_with_calls_cannot_be_left_open(pair: tuple[Tokenizer, Any], content: str | None) -> None:
    """Its calls were left out, so the model went on from a turn that never was."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content, "tool_calls": [_CALL]}]
    with pytest.raises(ChatTemplateError, match="the final message has tool calls, which end it"):
        encode_chat(pair[0], chat, continue_final_message=True, chat_template=templates.CHATML)


def test_a_last_message_stays_open_where_the_messages_are_said_in_another_way(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "So,  "},
    ]
    ids = encode_chat(
        ours, chat, add_generation_prompt=False, continue_final_message=True, chat_template=templates.GEMMA
    )
    text = ours.decode(ids, skip_special_tokens=False)
    assert text.endswith("user\nS\n\na<end_of_turn>\n<start_of_turn>model\nb\n\nSo,"), text


def test_a_template_says_which_variables_it_names() -> None:
    source = "{% set a = verbosity %}{% for d in documents %}{{ d.title }}{{ a }}{% endfor %}{{ messages[0].user }}"
    assert {"verbosity", "documents", "messages"} <= ChatTemplate(source).variables
    assert not {"a", "d", "title", "user"} & ChatTemplate(source).variables


@pytest.mark.parametrize("variables", _VARIABLES)
@pytest.mark.parametrize("chat", _CHATS)
@pytest.mark.parametrize("template", templates.ALL)
def test_ids_equal_those_of_transformers(pair: tuple[Tokenizer, Any], template: str, chat: str, variables: str) -> None:
    """Where the template fails on content that is null, Weft gives it an empty one."""
    ours, reference = pair
    source, messages, kwargs = templates.ALL[template], _CHATS[chat], _VARIABLES[variables]
    with_text = [{**message, "content": message["content"] or ""} for message in messages]
    for prompt in (True, False):
        outcomes = [
            _outcome(
                lambda prompt=prompt, given=given: reference.apply_chat_template(
                    given, chat_template=source, add_generation_prompt=prompt, return_dict=False, **kwargs
                )
            )
            for given in (messages, with_text)
        ]
        expected = next((outcome for outcome in outcomes if outcome != "refused"), "refused")
        assert expected == _outcome(
            lambda prompt=prompt: encode_chat(
                ours,
                messages,
                chat_template=source,
                add_generation_prompt=prompt,
                repairs=False,
                template_kwargs=kwargs,
            )
        )


def test_the_golden_chats_are_rendered_by_every_template(pair: tuple[Tokenizer, Any]) -> None:
    """If all were refused, the comparison above would compare nothing."""
    for source in templates.ALL.values():
        assert len(encode_chat(pair[0], _CHATS["plain"], chat_template=source)) > 10


def _render(source: str, messages: list[dict[str, Any]], **variables: object) -> str:
    """The messages as they are; what is done where a template fails is tested in test_conversation_repairs.py."""
    return ChatTemplate(source).render(messages, True, variables, repairs=False)


def test_the_templates_own_refusal_reaches_the_caller() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        _render(templates.MISTRAL, messages, bos_token="<s>", eos_token="</s>")


def test_a_role_that_the_template_does_not_know_is_refused_in_its_words() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ChatTemplateError, match="refuses these messages: System role not supported"):
        _render(templates.GEMMA, messages, bos_token="<bos>")
    turns = [
        {"role": "user", "content": " a "},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert _render(templates.GEMMA, turns, bos_token="<bos>") == (
        "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
        "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{{ nothing.there }}"])
def test_a_template_that_fails_refuses_the_messages(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template refuses these messages: "):
        _render(source, [{"role": "user", "content": "a"}])


@pytest.mark.parametrize("source", ["{{ messages[0].update(a=1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"])
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="unsafe"):
        _render(source, [{"role": "user", "content": "a"}])


def test_an_invalid_template_names_the_line() -> None:
    with pytest.raises(ChatTemplateError, match="invalid at line 2"):
        ChatTemplate("a\n{% for %}")


def test_developer_is_system_unless_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert _render("{{ messages[0].role }}", messages) == "system"
    assert _render("{{ messages[0].role }}{% if 0 == 'developer' %}{% endif %}", messages) == "developer"


@pytest.mark.parametrize("given", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_has_every_name(given: str) -> None:
    source = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    assert _render(source, [{"role": "assistant", "content": "", given: "so"}]) == "so so"


def test_the_template_for_tools_is_preferred_when_there_are_tools() -> None:
    named = ChatTemplates({"default": "d", "tool_use": "t", "rag": "r"})
    assert named.select(has_tools=False).render([], True, {}) == "d"
    assert named.select(has_tools=True).render([], True, {}) == "t"
    assert ChatTemplates({"default": "d", "rag": "r"}).select(has_tools=True).render([], True, {}) == "d"


def test_without_a_default_the_names_are_told() -> None:
    with pytest.raises(ChatTemplateError, match="no default chat template, only a, b"):
        ChatTemplates({"b": "", "a": ""}).select(has_tools=False)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplates({}).select(has_tools=False)


def test_a_key_without_a_value_is_not_there() -> None:
    source = "{{ 'name' in messages[0] }}{{ messages[0].content == '' }}{{ tools is none }}{{ documents is none }}"
    assert _render(source, [{"role": "assistant", "content": None, "name": None}]) == "FalseTrueTrueTrue"


def test_tojson_is_plain_json() -> None:
    value = {"b": "<é>", "a": [1, None]}
    assert _render("{{ x | tojson }}", [], x=value) == json.dumps(value, ensure_ascii=False)
