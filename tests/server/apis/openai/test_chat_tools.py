"""Tools, reasoning and structure through HTTP: what the engine is asked, and how its answer is read."""

import json
from typing import Any

import pytest

from tests.chat_templates_for_tests import QWEN3
from weft.engine.wire.messages import RejectReason
from weft.server.errors import rejection

WEATHER: dict[str, Any] = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ö \\"x\\""}}\n</tool_call>'
ARGUMENTS = '{"city": "Ö \\"x\\""}'


@pytest.fixture
def site(make_site: Any) -> Any:
    site = make_site()
    site.tokenizer.template = QWEN3
    site.tokenizer.added_ids = {"<think>": 300, "</think>": 301}
    site.rebuild()
    return site


def deltas(reply: Any) -> list[dict[str, Any]]:
    return [choice["delta"] for event in reply.events for choice in event["choices"]]


def test_calls_are_answered_as_calls(site: Any) -> None:
    site.engine.answers = [f"<think>\nwell\n</think>\n\nLook.\n{CALL}\n{CALL}"]
    reply = site.chat(tools=TOOLS).json
    (choice,) = reply["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Look.", "well", "well")
    assert [call["function"] for call in message["tool_calls"]] == [{"arguments": ARGUMENTS, "name": "weather"}] * 2
    assert [call["type"] for call in message["tool_calls"]] == ["function"] * 2
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(call_id.startswith("call_") for call_id in ids)
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("<think>\nwell\n</think>\n\n")
    assert site.tokenizer.variables["tools"] == TOOLS
    (grammar,) = json.loads(site.engine.asked[0].guidance.grammar)["grammars"]
    assert '"additionalProperties": false' in grammar["lark_grammar"]  # unless the schema says otherwise


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_streamed_calls_come_as_head_and_fragments(site: Any, chunk: int) -> None:
    site.engine.answers, site.engine.chunk = [f"<think>\nwell\n</think>\n\nLook.\n{CALL}"], chunk
    reply = site.chat(tools=TOOLS, stream=True)
    told = deltas(reply)
    assert "".join(delta.get("reasoning_content", "") for delta in told) == "well"
    assert all(delta.get("reasoning_content") == delta.get("reasoning") for delta in told)
    assert "".join(delta.get("content", "") for delta in told) == "Look."
    head, *rest = [delta["tool_calls"][0] for delta in told if "tool_calls" in delta]
    assert (head["index"], head["type"], head["function"]) == (0, "function", {"arguments": "", "name": "weather"})
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in rest)
    assert "".join(call["function"]["arguments"] for call in rest) == ARGUMENTS
    assert reply.events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_old_function_calls_are_answered_the_old_way(site: Any) -> None:
    site.engine.answers = [CALL]
    (choice,) = site.chat(functions=[WEATHER]).json["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"arguments": ARGUMENTS, "name": "weather"}
    assert "tool_calls" not in choice["message"]
    told = [d["function_call"] for d in deltas(site.chat(functions=[WEATHER], stream=True)) if "function_call" in d]
    assert told[0] == {"arguments": "", "name": "weather"}
    assert "".join(call["arguments"] for call in told) == ARGUMENTS


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_input_of_a_custom_tool_is_text(site: Any, is_stream: bool) -> None:
    site.engine.answers = ['<tool_call>\n{"name": "sql", "arguments": {"input": "SELECT \\"ö\\""}}\n</tool_call>']
    reply = site.chat(tools=[{"type": "custom", "custom": {"name": "sql"}}], stream=is_stream)
    if is_stream:
        calls = [call for delta in deltas(reply) for call in delta.get("tool_calls", [])]
        assert [call["custom"] for call in calls] == [{"input": "", "name": "sql"}, {"input": 'SELECT "ö"'}]
    else:
        (call,) = reply.json["choices"][0]["message"]["tool_calls"]
        assert (call["type"], call["custom"]) == ("custom", {"input": 'SELECT "ö"', "name": "sql"})


def test_a_call_that_is_cut_off_ends_with_length(site: Any) -> None:
    site.engine.answers = [CALL]
    (choice,) = site.chat(tools=TOOLS, max_tokens=60).json["choices"]
    assert choice["finish_reason"] == "length"
    assert ARGUMENTS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_opening_of_a_call_that_is_cut_off_is_no_content(site: Any, is_stream: bool) -> None:
    site.engine.answers = [f"Look. {CALL}"]
    reply = site.chat(tools=TOOLS, max_tokens=len('Look. <tool_call>\n{"name":'), stream=is_stream)
    if is_stream:
        assert "".join(delta.get("content", "") for delta in deltas(reply)) == "Look."
    else:
        assert reply.json["choices"][0]["message"]["content"] == "Look."


def test_the_input_of_a_custom_tool_that_is_cut_off_is_what_there_is(site: Any) -> None:
    begun = '<tool_call>\n{"name": "sql", "arguments": {"input": "SELECT 1'
    site.engine.answers = [begun + '23"}}\n</tool_call>']
    reply = site.chat(tools=[{"type": "custom", "custom": {"name": "sql"}}], max_tokens=len(begun))
    (call,) = reply.json["choices"][0]["message"]["tool_calls"]
    assert call["custom"]["input"] == "SELECT 1"


def test_without_tools_nothing_is_a_call(site: Any) -> None:
    site.engine.answers = [CALL]
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = site.chat(**fields).json["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert site.engine.asked[-1].guidance.grammar is None
    assert "tools" not in site.tokenizer.variables


def test_log_probabilities_are_those_of_content(site: Any) -> None:
    site.engine.answers = [f"<think>a</think>Hi{CALL}"]
    (choice,) = site.chat(tools=TOOLS, logprobs=True).json["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["H", "i"]
    events = site.chat(tools=TOOLS, logprobs=True, stream=True).events
    told = [choice for event in events for choice in event["choices"] if choice["logprobs"]]
    assert [(c["delta"]["content"], [t["token"] for t in c["logprobs"]["content"]]) for c in told] == [
        ("H", ["H"]),
        ("i", ["i"]),
    ]


def test_reasoning_can_be_left_out_of_the_answer(site: Any) -> None:
    site.engine.answers = ["<think>a</think>Hi"]
    message = site.chat(include_reasoning=False).json["choices"][0]["message"]
    assert "reasoning" not in message
    assert message["content"] == "Hi"
    assert all("reasoning" not in delta for delta in deltas(site.chat(include_reasoning=False, stream=True)))


@pytest.mark.parametrize(
    ("fields", "variables", "max_tokens"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": False}, None),
        ({"reasoning_effort": "low"}, {"enable_thinking": True}, 1024),
        ({"reasoning_effort": "high"}, {"enable_thinking": True}, None),
        ({"reasoning_effort": "low", "thinking_token_budget": 5}, {"enable_thinking": True}, 5),
        ({"reasoning_budget_tokens": 0}, {}, 0),
        ({"chat_template_kwargs": {"enable_thinking": False, "x": [1]}}, {"enable_thinking": False, "x": [1]}, None),
    ],
)
def test_how_much_a_model_thinks(
    site: Any, fields: dict[str, Any], variables: dict[str, Any], max_tokens: int | None
) -> None:
    assert site.chat(**fields).status == 200
    assert site.tokenizer.variables == variables
    budget = site.engine.asked[0].guidance.reasoning_budget
    assert (None if budget is None else budget.max_tokens) == max_tokens
    if budget is not None:
        assert (budget.begin_token_id, budget.end_token_id) == (300, 301)


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"thinking_token_budget": 512}, {"thinking_budget": 512}),
        ({"reasoning_effort": "none"}, {"thinking_budget": 0}),
        ({"reasoning_effort": "high"}, {"thinking_budget": -1}),
    ],
)
def test_a_template_is_told_the_budget(make_site: Any, fields: dict[str, Any], variables: dict[str, Any]) -> None:
    """Seed-OSS counts its reasoning itself."""
    site = make_site()
    site.tokenizer.template = "{% if thinking_budget == 0 %}<seed:think></seed:think>{% endif %}"
    site.rebuild()
    reply = site.chat(**fields)
    assert reply.status == 200
    assert site.tokenizer.variables == variables
    assert "x-ignored-params" not in reply.headers


def test_effort_without_effect_is_reported(make_site: Any) -> None:
    reply = make_site().chat(reasoning_effort="low", thinking_token_budget=3)
    assert reply.status == 200
    assert reply.headers["x-ignored-params"] == "thinking_token_budget,reasoning_effort"


def test_a_prediction_is_sent_as_tokens(site: Any) -> None:
    site.chat(prediction={"type": "content", "content": [{"type": "text", "text": "ab"}]})
    assert site.engine.asked[0].guidance.prediction_token_ids == (97, 98)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"guided_regex": "("}, "invalid_grammar", "guided_regex"),
        ({"guided_json": {"type": "string"}}, "invalid_json_schema", "guided_json"),
        ({"tools": TOOLS}, "invalid_json_schema", "tools[0].function.parameters"),
    ],
)
def test_what_cannot_be_compiled_is_the_callers_fault(site: Any, body: dict[str, Any], code: str, param: str) -> None:
    site.engine.refuse = rejection(RejectReason.GRAMMAR, "unbalanced")
    reply = site.chat(**body)
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == (code, param)
    assert "unbalanced" in reply.error["message"]
    assert reply.headers["x-should-retry"] == "false"


def test_tools_need_a_template_that_shows_them(make_site: Any) -> None:
    reply = make_site().chat(tools=TOOLS)
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == ("unsupported_parameter", "tools")
    assert "shows no tools" in reply.error["message"]


def test_a_structure_on_completions(site: Any) -> None:
    assert site.complete(guided_choice=["a", "b"]).status == 200
    assert json.loads(site.engine.asked[0].guidance.grammar) == {
        "grammars": [{"lark_grammar": 'start: CHOICE\nCHOICE: "a" | "b"'}]
    }
    assert site.complete(prediction={"type": "content", "content": "x"}).error["param"] == "prediction"


def test_tokenize_shows_tools_to_the_template(site: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "chat_template_kwargs": {"x": 1}}
    assert site.call("POST", "/tokenize", json=body).status == 200
    assert site.tokenizer.variables == {"x": 1, "tools": TOOLS}


LOOKAHEAD = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(?!/)", "maxLength": 9}}}
LOST = "properties.x.pattern"


@pytest.mark.parametrize(
    ("path", "body", "at"),
    [
        (
            "/v1/chat/completions",
            {"tools": [*TOOLS, {"type": "function", "function": {"name": "bad", "parameters": LOOKAHEAD}}]},
            "tools[1].function.parameters",
        ),
        ("/v1/chat/completions", {"functions": [{"name": "bad", "parameters": LOOKAHEAD}]}, "functions[0].parameters"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": LOOKAHEAD}}},
            "response_format.json_schema.schema",
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "tools": [{"name": "bad", "input_schema": LOOKAHEAD}]},
            "tools[0].input_schema",
        ),
        (
            "/v1/responses",
            {"input": "Hi", "tools": [{"type": "function", "name": "bad", "parameters": LOOKAHEAD}]},
            "tools[0].parameters",
        ),
        (
            "/v1/responses",
            {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": LOOKAHEAD}}},
            "text.format.schema",
        ),
        (
            "/api/chat",
            {"stream": False, "tools": [{"type": "function", "function": {"name": "bad", "parameters": LOOKAHEAD}}]},
            "tools[0].function.parameters",
        ),
        ("/api/chat", {"stream": False, "format": LOOKAHEAD}, "format"),
    ],
)
def test_every_api_reports_what_a_grammar_cannot_enforce(site: Any, path: str, body: dict[str, Any], at: str) -> None:
    messages = {} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "Hi"}]}
    reply = site.call("POST", path, json={**messages, **body})
    assert reply.status == 200, reply.text
    assert reply.headers["x-ignored-params"] == f"{at}.{LOST}"
    grammar = site.engine.asked[0].guidance.grammar
    assert "(?!" not in grammar and "maxLength" in grammar


def test_a_schema_of_an_answer_that_is_none_is_refused(site: Any) -> None:
    wanted = {"name": "n", "schema": {"type": "object", "properties": {"x": {"type": "teapot"}}}}
    error = site.chat(response_format={"type": "json_schema", "json_schema": wanted}).error
    assert (error["code"], error["param"]) == ("invalid_json_schema", "response_format.json_schema.schema")
    assert error["message"] == 'response_format.json_schema.schema.properties.x.type cannot be "teapot"'
