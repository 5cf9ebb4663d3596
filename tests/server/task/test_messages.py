from typing import Any

import pytest


def test_content_parts_become_one_text(site: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert site.chat(messages=[{"role": "user", "content": parts}]).status == 200
    assert site.tokenizer.rendered == [{"role": "user", "content": "a\nb"}]


def test_what_a_template_sees(site: Any) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "a", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "function_call": {"name": "g", "arguments": "no json"}},
        {"role": "function", "name": "g", "content": "5"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}], "reasoning_content": "x"},
    ]
    site.tokenizer.bos_token_id = None
    assert site.chat(messages=messages).status == 200
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}
    assert site.tokenizer.rendered == [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [{"id": "1", **call}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "no json"}}],
        },
        {"role": "tool", "content": "5", "name": "g", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "Never.", "reasoning_content": "x"},
    ]


@pytest.mark.parametrize("role", ["assistant", "tool", "function"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_a_replayed_turn_may_say_nothing(site: Any, role: str, content: dict[str, Any]) -> None:
    """An answer that was cut before its first word ended the session."""
    user = {"role": "user", "content": "a"}
    assert site.chat(messages=[user, {"role": role, **content}, user]).status == 200
    assert site.tokenizer.rendered[1] == {"role": role.replace("function", "tool"), "content": ""}


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "image", "document"])
def test_parts_that_a_text_model_cannot_see(site: Any, kind: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "data:"}}]
    error = site.chat(messages=[{"role": "user", "content": parts}]).error
    assert (error["code"], error["param"]) == ("unsupported_value", "messages[0].content[1]")


@pytest.mark.parametrize(
    ("messages", "code", "param"),
    [
        ([], "invalid_value", "messages"),
        ([{"role": "user", "content": [{"type": "poem"}]}], "invalid_value", "messages[0].content[0].type"),
        ([{"role": "assistant", "audio": {"id": "a"}}], "unsupported_value", "messages[0].audio"),
    ],
)
def test_refused(site: Any, messages: Any, code: str, param: str) -> None:
    error = site.chat(messages=messages).error
    assert (error["code"], error["param"]) == (code, param)


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ('{"city": "Oslo"}', {"city": "Oslo"}),
        ("{}", {}),
        ('{"city": "Os', '{"city": "Os'),
        ('{"city": "Oslo"}{"city": "Rome"}', '{"city": "Oslo"}{"city": "Rome"}'),
        ("city: Oslo", "city: Oslo"),
        ('["Oslo"]', '["Oslo"]'),
        ('"Oslo"', '"Oslo"'),
        ("12", "12"),
        ("true", "true"),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        (None, {}),
        ({"city": "Zürich"}, {"city": "Zürich"}),
        (["Oslo"], '["Oslo"]'),
        (2**70, str(2**70)),
    ],
)
def test_arguments_are_an_object_or_the_models_own_text(site: Any, sent: Any, shown: Any) -> None:
    """One call that was cut ended the session, for every later turn held it."""
    function = {"name": "f", "arguments": sent}
    user = {"role": "user", "content": "a"}
    for turn in ({"tool_calls": [{"id": "1", "type": "function", "function": function}]}, {"function_call": function}):
        assert site.chat(messages=[user, {"role": "assistant", **turn}]).status == 200
        assert site.tokenizer.rendered[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": shown}


@pytest.mark.parametrize(
    ("parts", "content", "reasoning"),
    [
        ([{"type": "thinking", "thinking": "T", "signature": "x"}, {"type": "text", "text": "A"}], "A", "T"),
        ([{"type": "thinking", "thinking": ""}, {"type": "text", "text": "A"}], "A", None),
        ([{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "A"}], "A", None),
        ([{"type": "reasoning", "text": "T"}, {"type": "text", "text": "A"}], "A", "T"),
        ([{"type": "text", "text": "A"}, {"type": "reasoning_text", "text": "T"}], "A", "T"),
        ([{"type": "thinking", "thinking": "T"}, {"type": "thinking", "thinking": "U"}], "", "T\nU"),
        ([{"type": "redacted_thinking", "data": "x"}], "", None),
    ],
)
def test_reasoning_among_the_parts_of_an_answer(site: Any, parts: Any, content: str, reasoning: str | None) -> None:
    """Clients that keep Anthropic's blocks send them back beside the text, and were refused."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}]
    assert site.chat(messages=messages).status == 200
    expected = {"role": "assistant", "content": content}
    assert site.tokenizer.rendered[1] == expected | ({} if reasoning is None else {"reasoning_content": reasoning})


def test_reasoning_that_has_a_field_of_its_own_is_not_taken_from_parts(site: Any) -> None:
    parts = [{"type": "thinking", "thinking": "T"}, {"type": "text", "text": "A"}]
    turn = {"role": "assistant", "content": parts, "reasoning_content": "R"}
    assert site.chat(messages=[{"role": "user", "content": "a"}, turn]).status == 200
    assert site.tokenizer.rendered[1] == {"role": "assistant", "content": "A", "reasoning_content": "R"}


def test_a_user_does_not_reason(site: Any) -> None:
    error = site.chat(messages=[{"role": "user", "content": [{"type": "thinking", "thinking": "T"}]}]).error
    assert (error["code"], error["param"]) == ("invalid_value", "messages[0].content[0].type")


def test_numbers_of_calls_are_not_those_of_given_ids(site: Any) -> None:
    calls = [{"id": "call_1", "function": {"name": "f"}}, {"function": {"name": "g"}}]
    results = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    assert site.chat(messages=[{"role": "assistant", "tool_calls": calls}, *results]).status == 200
    said = site.tokenizer.rendered
    assert [call["id"] for call in said[0]["tool_calls"]] == [turn["tool_call_id"] for turn in said[1:]]
    assert len({turn["tool_call_id"] for turn in said[1:]}) == 2
