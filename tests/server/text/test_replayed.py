"""What clients say again in forms of their own reaches the template, on each API."""

import json
from typing import Any

import pytest

from weft.server.text.replayed import MAX_DEPTH, is_deep, read_nested_choice, read_turns, reasoning_text

USER: dict[str, Any] = {"role": "user", "content": "Hi"}


def post(site: Any, path: str, body: dict[str, Any]) -> Any:
    """Send a body that may hold halves of characters, as escapes."""
    headers = {"content-type": "application/json"}
    return site.call("POST", f"/v1/{path}", content=json.dumps(body), headers=headers)


def shown(site: Any, api: str, items: list[Any]) -> list[dict[str, Any]]:
    """What the template sees after the first message of the user."""
    conversation = [USER, *items]
    if api == "chat":
        reply = post(site, "chat/completions", {"messages": conversation})
    elif api == "messages":
        reply = post(site, api, {"max_tokens": 9, "messages": conversation})
    else:
        reply = post(site, api, {"store": False, "input": conversation})
    assert reply.status == 200, reply.text
    rendered: list[dict[str, Any]] = site.tokenizer.rendered[1:]
    return rendered


def calling(api: str, arguments: Any, result: Any = "ok") -> list[Any]:
    """A call of f and its result."""
    if api == "chat":
        call = {"id": 1, "type": None, "function": {"name": "f", "arguments": arguments}}
        return [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": 1, "content": result},
        ]
    if api == "messages":
        use = {"type": "tool_use", "id": "1", "name": "f", "input": arguments}
        answer = {"type": "tool_result", "tool_use_id": "1", "content": result}
        return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [answer]}]
    return [
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "1", "output": result},
    ]


APIS = pytest.mark.parametrize("api", ["chat", "messages", "responses"])


@APIS
@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ('{"a": ', '{"a": '),
        (None, {}),
        ([], "[]"),
        ("[" * 3000, "[" * 3000),
        ('{"a":' * 3000, '{"a":' * 3000),
        ('{"a":' * 600 + "1" + "}" * 600, '{"a":' * 600 + "1" + "}" * 600),
        ('{"a":"' + "[" * 200 + '"}', {"a": "[" * 200}),
    ],
)
def test_arguments_of_any_form_stay_in_the_conversation(site: Any, api: str, sent: Any, seen: Any) -> None:
    call, result = shown(site, api, calling(api, sent))
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": seen}
    assert result["tool_call_id"] == call["tool_calls"][0]["id"] == "1"


@APIS
@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ({"temp": 5}, '{"temp": 5}'),
        (5, "5"),
        (["a"], '["a"]'),
        ([1, 2], "[1, 2]"),
        (None, ""),
        ([], ""),
        ("out \ud83d", "out \ufffd"),
        ([{"type": "text", "text": None}], ""),
        ([{"type": "text", "text": "a\udc00"}], "a\ufffd"),
    ],
)
def test_results_of_any_form_are_text(site: Any, api: str, sent: Any, seen: str) -> None:
    assert shown(site, api, calling(api, {}, sent))[1]["content"] == seen


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_parts_of_results_with_unknown_types_are_json(site: Any, api: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "json", "value": 5}]
    assert shown(site, api, calling(api, {}, parts))[1]["content"] == 'a\n{"type": "json", "value": 5}'


@pytest.mark.parametrize(
    ("api", "item"),
    [
        ("chat", {"role": "user", "content": None}),
        ("chat", {"role": "user", "content": [{"type": "text", "text": None}]}),
        ("messages", {"role": "user", "content": None}),
        ("messages", {"role": "user", "content": [{"type": "text", "text": None}]}),
        ("responses", {"role": "user", "content": None}),
        ("responses", {"role": "assistant", "content": None}),
    ],
)
def test_null_is_an_empty_text(site: Any, api: str, item: Any) -> None:
    assert shown(site, api, [item])[0]["content"] == ""


def test_a_custom_call_may_have_no_input(site: Any) -> None:
    chat = {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "f", "input": None}}]}
    own = {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": None}
    for api, item in (("chat", chat), ("responses", own)):
        assert shown(site, api, [item])[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"input": ""}}


REASONING = [
    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "reasoning", "reasoning": {"text": "hm"}},
    {"type": "reasoning_text", "text": "hm"},
]


@APIS
@pytest.mark.parametrize("part", REASONING)
def test_reasoning_among_the_parts_is_reasoning(site: Any, api: str, part: Any) -> None:
    text = {"type": "output_text" if api == "responses" else "text", "text": "a"}
    content = [part, {"type": "redacted_thinking", "data": "x"}, text]
    message = shown(site, api, [{"role": "assistant", "content": content}, USER])[0]
    assert message == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


@pytest.mark.parametrize("member", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("value", ["hm", ["hm"], *([part] for part in REASONING), {"text": "hm"}])
def test_reasoning_of_any_form_in_a_member(site: Any, member: str, value: Any) -> None:
    assert shown(site, "chat", [{"role": "assistant", "content": "a", member: value}])[0]["reasoning_content"] == "hm"


@pytest.mark.parametrize("more", [{"summary": "hm"}, {"content": {"type": "reasoning_text", "text": "hm"}}])
def test_reasoning_of_any_form_in_an_item(site: Any, more: Any) -> None:
    items = [{"type": "reasoning", **more}, {"role": "assistant", "content": "a"}]
    assert shown(site, "responses", items)[0]["reasoning_content"] == "hm"


@pytest.mark.parametrize("item", [{"type": "item_reference", "id": "rs_abc"}, {"id": "rs_abc"}])
def test_a_reference_to_unknown_reasoning_is_left_out(site: Any, item: Any) -> None:
    reply = site.call("POST", "/v1/responses", json={"input": [USER, item, {**USER, "content": "b"}]})
    assert (reply.status, reply.headers["x-ignored-params"]) == (200, "input[1].id")


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "input_text", "text": "a"}, "a"),
        ({"type": "output_text", "text": "a", "annotations": []}, "a"),
        ("a", "a"),
    ],
)
def test_parts_of_other_apis_are_texts_in_chat(site: Any, part: Any, text: str) -> None:
    assert shown(site, "chat", [{"role": "user", "content": [part]}])[0]["content"] == text


def test_a_document_of_text_is_its_text(site: Any) -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
    assert shown(site, "messages", [{"role": "user", "content": [document]}])[0]["content"] == "a"


@pytest.mark.parametrize(
    ("choice", "status"),
    [
        ("any", 200),
        ({"type": "auto"}, 200),
        ({"type": "none"}, 200),
        ({"type": "required"}, 200),
        ({"type": "function", "name": "f"}, 200),
        ({"type": "function", "name": "g"}, 400),
        ({"type": "poem"}, 400),
        ("poem", 400),
    ],
)
def test_a_choice_in_the_words_of_other_apis(choice: Any, status: int) -> None:
    read = read_nested_choice(choice)
    assert (read in ("auto", "none", "required") or read == {"type": "function", "function": {"name": "f"}}) == (
        status == 200
    )


@pytest.mark.parametrize(
    ("reasoning", "status"),
    [({"effort": "low"}, 200), ({"enabled": False}, 200), ({"enabled": True}, 200), ({}, 200), ({"effort": 3}, 400)],
)
def test_reasoning_as_openrouter_has_it(site: Any, reasoning: Any, status: int) -> None:
    assert site.chat(reasoning=reasoning).status == status


def test_two_efforts_must_agree(site: Any) -> None:
    assert site.chat(reasoning={"effort": "low"}, reasoning_effort="low").status == 200
    assert site.chat(reasoning={"effort": "low"}, reasoning_effort="high").error["param"] == "reasoning"


def test_half_a_character_in_a_name_is_refused(site: Any) -> None:
    assert post(site, "chat/completions", {"messages": [{**USER, "a\ud83d": 1}]}).status == 400
    tools = [{"type": "function", "function": {"name": "f", "description": "\ud83d"}}]
    error = post(site, "chat/completions", {"messages": [USER], "tools": tools}).error
    assert error["param"] == "tools[0].function.description"


@pytest.mark.parametrize("depth", [100, 900])
def test_a_deep_block_of_an_unknown_type_is_shown_down_to_a_bound(site: Any, depth: int) -> None:
    block = json.loads('{"type": "odd", "a": ' + '{"b": ' * depth + "1" + "}" * (depth + 1))
    text = shown(site, "messages", [{"role": "assistant", "content": [block]}, USER])[0]["content"]
    assert text == 'odd: {"a":' + '{"b":' * MAX_DEPTH + '"(1 members)"' + "}" * (MAX_DEPTH + 1)


def test_depth_is_bounded() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert not is_deep(value)
    assert is_deep({"a": [value]})
    assert reasoning_text(value) is None


def called(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    """Calls of f as the template sees them."""
    functions = [(id, {"name": "f", "arguments": arguments}) for id, arguments in pairs]
    return [{"id": id, "type": "function", "function": function} for id, function in functions]


ASSISTANT, OK = {"role": "assistant"}, {"role": "tool", "content": "ok", "tool_call_id": "1"}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
VERCEL = {"type": "tool-call", "toolCallId": "1", "toolName": "f", "input": {"a": 1}}
ITEM = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}
HM = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
OF_OTHER_APIS: list[list[Any]] = [  # each is one call and its result
    calling("responses", '{"a": 1}'),
    [ITEM, {"type": "function_call_output", "call_id": "1", "output": [{"type": "output_text", "text": "ok"}]}],
    calling("messages", {"a": 1}),
    [{**ASSISTANT, "content": [VERCEL]},
     {"role": "tool", "content": [{"type": "tool-result", "toolCallId": "1", "toolName": "f",
                                   "output": {"type": "text", "value": "ok"}}]}],
    [{**ASSISTANT, "content": [VERCEL, {"type": "tool-result", "toolCallId": "1", "result": "ok"}]}],
    *([{**ASSISTANT, "content": None, "tool_calls": [call]}, OK] for call in (
        {"id": "1", "name": "f", "arguments": {"a": 1}},
        {"type": "tool_call", "id": "1", "name": "f", "args": {"a": 1}},
        {"type": "tool_call", "id": "1", "function": {"name": "f", "arguments": {"a": 1}}}, USE, VERCEL, ITEM)),
]  # fmt: skip


@pytest.mark.parametrize("items", OF_OTHER_APIS)
def test_calls_in_the_forms_of_other_apis_are_calls_in_chat(site: Any, items: list[Any]) -> None:
    """A session that began elsewhere ended with a 400."""
    call, result = shown(site, "chat", items)
    assert (call["role"], call["content"], call["tool_calls"]) == ("assistant", None, called(("1", {"a": 1})))
    assert result == OK


def test_items_of_one_turn_are_one_turn(site: Any) -> None:
    second = {**ITEM, "call_id": "2"}
    outputs = [{"type": "function_call_output", "call_id": id, "output": "ok"} for id in "12"]
    turn, *results, last = shown(site, "chat", [HM, ITEM, second, *outputs, {**ASSISTANT, "content": "done"}])
    assert turn["tool_calls"] == called(("1", {"a": 1}), ("2", {"a": 1})) and turn["reasoning_content"] == "hm"
    assert results == [OK, {**OK, "tool_call_id": "2"}] and last["content"] == "done"
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    assert shown(site, "chat", [HM, message, USER])[0] == {**ASSISTANT, "content": "a", "reasoning_content": "hm"}


def test_text_beside_blocks_keeps_its_place(site: Any) -> None:
    text = {"type": "text", "text": "I look."}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "ok", "is_error": True}
    turns = [{**ASSISTANT, "content": [text, USE]}, {"role": "user", "content": [result, {**text, "text": "And?"}]}]
    call, *rest = shown(site, "chat", turns)
    assert (call["content"], call["tool_calls"]) == ("I look.", called(("1", {"a": 1})))
    assert rest == [OK, {"role": "user", "content": "And?"}]


@pytest.mark.parametrize(
    "content", [["a"], ["a", {"type": "text", "text": "b"}], [{"type": "output_text", "text": "a"}]]
)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_texts_among_parts_are_texts(site: Any, role: str, content: Any) -> None:
    [turn, _] = shown(site, "chat", [{"role": role, "content": content}, USER])
    assert turn["content"] == "\n".join("ab"[: len(content)])


@pytest.mark.parametrize("kind", ["server_tool_use", "web_search_tool_result", "poem"])
def test_what_another_server_did_in_its_answer_is_json(site: Any, kind: str) -> None:
    part = {"type": kind, "id": "1", "input": {"query": "q"}}
    [turn, _] = shown(site, "chat", [{**ASSISTANT, "content": [part, {"type": "text", "text": "a"}]}, USER])
    assert turn["content"] == json.dumps(part) + "\na"
    assert post(site, "chat/completions", {"messages": [{"role": "user", "content": [part]}]}).status == 400


def test_a_custom_call_that_is_an_item_is_one(site: Any) -> None:
    item = {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "text"}
    output = {"type": "custom_tool_call_output", "call_id": "1", "output": "ok"}
    call, result = shown(site, "chat", [item, output])
    assert (call["tool_calls"], result) == (called(("1", {"input": "text"})), OK)


@pytest.mark.parametrize(
    "turn",
    [
        {"content": "no role"},
        {"type": "poem", "text": "a"},
        {"type": "function_call", "call_id": "1"},
        {**ASSISTANT, "tool_calls": [{"id": "1"}]},
        {**ASSISTANT, "content": [{"type": "tool_use", "id": "1"}]},
        {**ASSISTANT, "tool_calls": "f"},
        5,
        None,
    ],
)
def test_what_is_no_turn_is_refused_by_its_place(site: Any, turn: Any) -> None:
    error = post(site, "chat/completions", {"messages": [USER, turn]}).error
    assert error["code"] in ("invalid_value", "invalid_type") and error["param"].startswith("messages[1]")


def test_reasoning_of_items_is_joined() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    thoughts = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in "ab"]
    (turn,) = read_turns([*thoughts, call, {"role": "assistant", "content": "x", "reasoning_content": None}])
    assert (turn["reasoning_content"], turn["content"], len(turn["tool_calls"])) == ("a\nb", "x", 1)
