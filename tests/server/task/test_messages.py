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
            "tool_calls": [{"type": "function", "function": {"name": "g", "arguments": "no json"}}],
        },
        {"role": "tool", "content": "5", "name": "g"},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "Never.", "reasoning_content": "x"},
    ]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_parts_that_a_text_model_cannot_see(site: Any, kind: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "data:"}}]
    error = site.chat(messages=[{"role": "user", "content": parts}]).error
    assert (error["code"], error["param"]) == ("unsupported_value", "messages[0].content[1]")


@pytest.mark.parametrize(
    ("messages", "code", "param"),
    [
        ([], "invalid_value", "messages"),
        ([{"role": "user"}], "invalid_value", "messages[0].content"),
        ([{"role": "assistant", "content": None}], "invalid_value", "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "invalid_value", "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "poem"}]}], "invalid_value", "messages[0].content[0].type"),
        ([{"role": "tool", "content": "4"}], "invalid_value", "messages[0].tool_call_id"),
        ([{"role": "assistant", "audio": {"id": "a"}}], "unsupported_value", "messages[0].audio"),
    ],
)
def test_refused(site: Any, messages: Any, code: str, param: str) -> None:
    error = site.chat(messages=messages).error
    assert (error["code"], error["param"]) == (code, param)
