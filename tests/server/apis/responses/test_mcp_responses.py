"""MCP tools in POST /v1/responses: a real MCP server on loopback, a scripted model, and the SDK's own types."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.chat_templates_for_tests import QWEN3
from tests.server.mcp_servers import RealServer, garbage, hanging, serve
from weft.server.errors import QueueFullError

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
LIST = ["output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done"]
CALLED = ["mcp_call_arguments.done", "mcp_call.completed", "output_item.done"]
CALL = ["output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta", *CALLED]
MESSAGE = [
    *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
    *("content_part.done", "output_item.done"),
]


def call(name: str, **arguments: Any) -> str:
    """How the scripted model calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def mcp(label: str = "tools", **members: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": label, "require_approval": "never", **members}


@pytest.fixture(scope="module")
def url_of() -> Iterator[dict[str, Any]]:
    """The servers of all tests: their URLs by label, and the real one itself."""
    real = RealServer()
    with serve(real.app()) as tools, serve(garbage) as bad, serve(hanging) as stuck:
        yield {"tools": tools, "bad": bad, "stuck": stuck, "down": "http://127.0.0.1:9/mcp", "real": real}


@pytest.fixture
def real(url_of: dict[str, Any]) -> RealServer:
    server: RealServer = url_of["real"]
    server.calls.clear()
    server.headers.clear()
    server.has_begun.clear()
    server.was_cancelled.clear()
    server.may_answer.set()
    return server


@pytest.fixture
def hosts(make_site: Any, url_of: dict[str, Any], real: RealServer) -> Any:
    def make(**settings: Any) -> Any:
        servers = {name: url for name, url in url_of.items() if name != "real"}
        servers["keyed"] = {"url": f"{url_of['tools']}?keyed", "headers": {"X-Key": "k1"}}
        site = make_site(mcp_servers=servers, mcp_max_bytes="100000", **settings)
        site.tokenizer.template, site.engine.chunk = QWEN3, 1000
        site.rebuild()
        return site

    return make


@pytest.fixture
def site(hosts: Any) -> Any:
    return hosts()


def ask(site: Any, *answers: str, **body: Any) -> dict[str, Any]:
    """The whole response to a body, for which the model says each answer in turn."""
    site.engine.answers, site.engine.asked = list(answers), []
    reply = site.call("POST", "/v1/responses", json={"input": "Hi", "tools": [mcp()], **body})
    assert reply.status == 200, reply.text
    Response.model_validate_json(reply.text, strict=True)
    answer: dict[str, Any] = reply.json
    return answer


def refusal(site: Any, **body: Any) -> dict[str, Any]:
    reply = site.call("POST", "/v1/responses", json={"input": "Hi", "tools": [mcp()], **body})
    assert reply.status == 400, reply.text
    error: dict[str, Any] = reply.error
    return error


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    for number, frame in enumerate(frame for frame in text.split("\n\n") if frame and not frame.startswith(":")):
        data = frame.split("\n")[1].removeprefix("data: ")
        event = json.loads(data)
        assert event["sequence_number"] == number
        assert EVENT.validate_json(data, strict=True).type == event["type"]
        events.append(event)
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types without repeated deltas."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if not (name.endswith("delta") and names[i - 1] == name)]


def types(answer: dict[str, Any]) -> list[str]:
    return [item["type"] for item in answer["output"]]


def test_the_model_goes_on_with_the_result_of_a_call(site: Any, real: RealServer) -> None:
    answer = ask(site, call("add", a=2, b=3), "It is 5.")
    listed, called, message = answer["output"]
    assert (listed["type"], called["type"], message["type"]) == ("mcp_list_tools", "mcp_call", "message")
    assert [tool["name"] for tool in listed["tools"]] == ["add", "echo", "slow", "failing", "huge"]
    assert listed["tools"][0]["description"] == "Add two numbers."
    assert (called["server_label"], called["name"], called["status"]) == ("tools", "add", "completed")
    assert (json.loads(called["arguments"]), called["output"], called["error"]) == ({"a": 2, "b": 3}, "5", None)
    assert message["content"][0]["text"] == "It is 5."
    assert real.calls == ["add"]
    shown = [(m["role"], m["content"], m.get("tool_call_id")) for m in site.tokenizer.rendered]
    assert shown == [("user", "Hi", None), ("assistant", None, None), ("tool", "5", called["id"])]
    prompts = [len(asked.prompt_token_ids) for asked in site.engine.asked]
    assert answer["usage"]["input_tokens"] == sum(prompts)
    assert answer["usage"]["output_tokens"] == len(call("add", a=2, b=3)) + len("It is 5.") + 2
    assert all(asked.generation.closed.is_set() for asked in site.engine.asked)


def test_events_come_in_order_and_make_up_the_response(site: Any) -> None:
    site.engine.answers, site.engine.chunk = [f"Look.{call('add', a=2, b=3)}{call('echo', text='ö')}", "Done."], 7
    reply = site.call("POST", "/v1/responses", json={"input": "Hi", "tools": [mcp()], "stream": True})
    events = events_of(reply.text)
    both = [*CALL[:4], *CALL[:4], *CALL[4:], *CALL[4:]]
    assert kinds(events) == ["created", "in_progress", *LIST, *MESSAGE, *both, *MESSAGE, "completed"]
    final = events[-1]["response"]
    assert final["output"] == [e["item"] for e in sorted(done(events), key=lambda e: e["output_index"])]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == final["output"][event["output_index"]]["id"]
    assert [item["output"] for item in final["output"] if item["type"] == "mcp_call"] == ["5", "ö"]
    for index in (2, 3):
        deltas = [e["delta"] for e in events if e["type"].endswith("arguments.delta") and e["output_index"] == index]
        assert "".join(deltas) == final["output"][index]["arguments"]


def done(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == "response.output_item.done"]


def test_the_sdk_holds_a_conversation_with_tools(site: Any, real: RealServer) -> None:
    site.engine.answers = [call("add", a=2, b=3), "5.", "Bye."]
    with site.live() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        tools: Any = [mcp()]
        first = client.responses.create(model="alias", input="Add.", tools=tools)
        assert first.output_text == "5."
        second = client.responses.create(
            model="alias", input="And?", tools=tools, previous_response_id=first.id, stream=True
        )
        last = [event.type for event in second][-1]
    assert last == "response.completed"
    assert [m["role"] for m in site.tokenizer.rendered] == ["user", "assistant", "tool", "assistant", "user"]
    assert sum(headers.get("mcp-method") == "tools/list" for headers in real.headers) == 1  # the input brings the list


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("is_approved", [True, False])
def test_a_call_waits_for_its_approval(site: Any, real: RealServer, is_approved: bool, is_stored: bool) -> None:
    tools = [mcp(require_approval="always")]
    first = ask(site, call("echo", text="hey"), tools=tools, store=is_stored)
    assert (types(first), first["status"]) == (["mcp_list_tools", "mcp_approval_request"], "completed")
    request = first["output"][1]
    assert (request["name"], request["server_label"], request["arguments"]) == ("echo", "tools", '{"text": "hey"}')
    assert real.calls == []
    decision = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": is_approved}
    items = [decision] if is_stored else [{"role": "user", "content": "Hi"}, *first["output"], decision]
    previous = {"previous_response_id": first["id"]} if is_stored else {}
    second = ask(site, "Fine.", tools=tools, input=items, store=is_stored, **previous)
    assert types(second) == (["mcp_call", "message"] if is_approved else ["message"])
    content = "hey" if is_approved else "The user did not approve this call."
    assert real.calls == ["echo"] * is_approved
    shown = [(m["role"], m["content"]) for m in site.tokenizer.rendered]
    assert shown == [("user", "Hi"), ("assistant", None), ("tool", content)]
    if is_approved:
        assert (second["output"][0]["approval_request_id"], second["output"][0]["output"]) == (request["id"], "hey")
    if is_stored:  # the call is not made again
        third = ask(site, "Bye.", tools=tools, input="More?", previous_response_id=second["id"])
        assert types(third) == ["message"]


def test_an_approved_call_streams_before_the_model_goes_on(site: Any) -> None:
    request = {"type": "mcp_approval_request", "id": "mcpr_1", "name": "add", "server_label": "tools"}
    items = [
        {**request, "arguments": '{"a": 1, "b": 1}'},
        {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
    ]
    site.engine.answers = ["Two."]
    body = {"input": items, "tools": [mcp()], "stream": True, "store": False}
    events = events_of(site.call("POST", "/v1/responses", json=body).text)
    assert kinds(events) == ["created", "in_progress", *LIST, *CALL, *MESSAGE, "completed"]


def test_a_filter_says_which_calls_need_an_approval(site: Any, real: RealServer) -> None:
    tools = [mcp(require_approval={"never": {"read_only": True}})]
    answer = ask(site, call("add", a=1, b=1) + call("echo", text="x"), tools=tools)
    assert types(answer) == ["mcp_list_tools", "mcp_call", "mcp_approval_request"]
    assert real.calls == ["add"]
    tools = [mcp(require_approval={"always": {"tool_names": ["echo"]}, "never": {"tool_names": ["add", "echo"]}})]
    assert types(ask(site, call("echo", text="x"), tools=tools)) == ["mcp_list_tools", "mcp_approval_request"]


@pytest.mark.parametrize("allowed", [["add"], {"tool_names": ["add"]}, {"read_only": True}])
def test_only_allowed_tools_are_offered(site: Any, allowed: Any) -> None:
    answer = ask(site, "Hm.", tools=[mcp(allowed_tools=allowed)])
    assert [tool["name"] for tool in answer["output"][0]["tools"]] == ["add"]
    assert [tool["function"]["name"] for tool in site.tokenizer.variables["tools"]] == ["add"]


def test_the_model_reads_what_the_client_says_of_a_server(site: Any) -> None:
    ask(site, "Hm.", tools=[mcp(allowed_tools=["add"], server_description="For sums.")])
    (tool,) = site.tokenizer.variables["tools"]
    assert tool["function"]["description"] == "For sums.\nAdd two numbers."


def test_a_call_of_a_tool_that_is_not_allowed_or_with_no_json_fails(site: Any, real: RealServer) -> None:
    request = {"type": "mcp_approval_request", "id": "mcpr_1", "name": "echo", "server_label": "tools"}
    items = [
        {**request, "arguments": '{"text": "x"}'},
        {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
    ]
    answer = ask(site, "Hm.", input=items, tools=[mcp(allowed_tools=["add"])])
    assert answer["output"][1]["error"]["message"] == "the tools of tools do not include echo"
    items[0]["arguments"] = '{"text": NaN}'
    answer = ask(site, "Hm.", input=items)
    assert answer["output"][1]["error"]["message"] == "the arguments are no JSON object"
    assert real.calls == []


def test_a_function_call_ends_the_response_after_the_calls_of_mcp_tools(site: Any, real: RealServer) -> None:
    tools = [mcp(), WEATHER]
    answer = ask(site, call("add", a=1, b=1) + call("weather", city="Ö"), tools=tools)
    assert types(answer) == ["mcp_list_tools", "mcp_call", "function_call"]
    output = {"type": "function_call_output", "call_id": answer["output"][2]["call_id"], "output": "sunny"}
    second = ask(site, "Nice.", tools=tools, input=[output], previous_response_id=answer["id"])
    assert types(second) == ["message"]
    shown = [m["content"] for m in site.tokenizer.rendered]
    assert shown == ["Hi", None, "2", None, "sunny"]


def test_names_that_are_taken_are_changed_for_the_model_alone(site: Any) -> None:
    echo = {"type": "function", "name": "echo"}
    answer = ask(site, call("tools_echo_1", text="x"), "Ok.", tools=[echo, mcp(allowed_tools=["echo"])])
    assert [tool["function"]["name"] for tool in site.tokenizer.variables["tools"]] == ["echo", "tools_echo_1"]
    assert (answer["output"][1]["name"], answer["output"][1]["output"]) == ("echo", "x")


@pytest.mark.parametrize("limit", ["max_tool_calls", "mcp_max_calls"])
def test_calls_are_bounded(hosts: Any, real: RealServer, limit: str) -> None:
    site = hosts(**({limit: 2} if limit == "mcp_max_calls" else {}))
    body = {limit: 2} if limit == "max_tool_calls" else {}
    twice = call("add", a=1, b=1) + call("add", a=2, b=2)
    answer = ask(site, call("add", a=1, b=1), twice, "Done.", **body)
    assert [item.get("status") for item in answer["output"]] == [None, "completed", "completed", "failed", "completed"]
    assert "at most 2 calls" in answer["output"][3]["error"]["message"]
    assert real.calls == ["add"] * 2
    assert "tools" not in site.tokenizer.variables  # none can be called any more


def test_the_tokens_of_all_rounds_are_bounded_together(site: Any) -> None:
    size = len(call("add", a=1, b=1)) + 1
    answer = ask(site, call("add", a=1, b=1), "It is two.", max_output_tokens=size + 4)
    assert answer["output"][2]["content"][0]["text"] == "It i"
    assert (answer["status"], answer["usage"]["output_tokens"]) == ("incomplete", size + 4)
    answer = ask(site, call("add", a=1, b=1), "It is two.", max_output_tokens=size)
    assert (types(answer), answer["status"]) == (["mcp_list_tools", "mcp_call"], "incomplete")


def test_a_call_that_is_cut_is_not_made(site: Any, real: RealServer) -> None:
    answer = ask(site, call("add", a=1, b=1), max_output_tokens=52)
    assert (answer["status"], answer["output"][1]["status"]) == ("incomplete", "incomplete")
    assert real.calls == []


FAILURES = {
    "failing": ("mcp_tool_execution_error", None, "Error executing tool failing"),
    "huge": ("http_error", 413, "more than 100000 bytes"),
    "slow": ("http_error", 504, "within 3 s"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_model_is_told_of_a_call_that_fails(hosts: Any, real: RealServer, name: str) -> None:
    site = hosts(mcp_timeout_s=3 if name == "slow" else 60)
    ask(site, "Warm.")  # the first connection imports the client
    answer = ask(site, call(name), "Sorry.")
    kind, code, text = FAILURES[name]
    called = answer["output"][1]
    assert (called["status"], called["output"]) == ("failed", None)
    assert (called["error"]["type"], called["error"].get("code")) == (kind, code)
    assert text in json.dumps(called["error"])
    assert text in site.tokenizer.rendered[-1]["content"]
    assert answer["output"][2]["content"][0]["text"] == "Sorry."


@pytest.mark.parametrize(
    ("label", "text"), [("bad", "JSON"), ("stuck", "did not answer within 1 s"), ("down", "could not be reached")]
)
def test_a_server_without_a_list_disturbs_nobody(hosts: Any, label: str, text: str) -> None:
    site = hosts(mcp_timeout_s=1 if label == "stuck" else 60)
    site.engine.answers = ["Without."]
    body = {"input": "Hi", "tools": [mcp(label), WEATHER], "stream": True}
    events = events_of(site.call("POST", "/v1/responses", json=body).text)
    failed = [*LIST[:2], "mcp_list_tools.failed", LIST[3]]
    assert kinds(events) == ["created", "in_progress", *failed, *MESSAGE, "completed"]
    listed = events[-1]["response"]["output"][0]
    assert listed["tools"] == []
    assert text in listed["error"]


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("is_background", [False, True])
def test_a_stream_is_kept_alive_while_a_server_is_listed(
    hosts: Any, real: RealServer, is_wrong: bool, is_background: bool
) -> None:
    real.may_answer.clear()
    site = hosts(sse_ping_s=0.1)
    choice = {"type": "mcp", "server_label": "tools", "name": "sub" if is_wrong else "add"}
    body = {"input": "Hi", "tools": [mcp()], "stream": True, "tool_choice": choice, "background": is_background}
    site.engine.answers = [call("add", a=1, b=1), "Done."]
    with site.live() as url, httpx.stream("POST", f"{url}/v1/responses", json=body, timeout=60) as reply:
        text = ""
        for part in reply.iter_text():
            text += part
            if not real.may_answer.is_set():
                assert part.startswith(": ping\n\n")
                real.may_answer.set()
    *_, last = events_of(text)
    assert last["type"] == ("error" if is_wrong else "response.completed")
    if is_wrong:
        assert last["param"] == "tool_choice.name"


def test_a_response_in_the_background_makes_calls(site: Any) -> None:
    site.engine.answers = [call("add", a=2, b=3), "5."]
    with site.live() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        tools: Any = [mcp()]
        stream = client.responses.create(model="alias", input="Add.", tools=tools, background=True, stream=True)
        events = [event.to_dict() for event in stream]
        stored = client.responses.retrieve(events[-1]["response"]["id"])  # type: ignore[index]
    assert kinds(events) == ["created", "queued", "in_progress", *LIST, *CALL, *MESSAGE, "completed"]
    assert [item.type for item in stored.output] == ["mcp_list_tools", "mcp_call", "message"]
    assert stored.output_text == "5."


def test_a_client_that_leaves_ends_the_call(site: Any, real: RealServer) -> None:
    site.engine.answers = [call("slow"), "Late."]
    body = {"input": "Hi", "tools": [mcp()], "stream": True}
    with site.live() as url, httpx.stream("POST", f"{url}/v1/responses", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        assert any("mcp_call_arguments.done" in line for line in lines)
        assert real.has_begun.wait(60)
        reply.close()
        assert real.was_cancelled.wait(60)
    assert len(site.engine.asked) == 1


def test_a_tool_may_be_required(site: Any) -> None:
    choice = {"type": "mcp", "server_label": "tools", "name": "add"}
    answer = ask(site, call("add", a=1, b=1), call("echo", text="x"), "Ok.", tool_choice=choice)
    assert [item.get("name") for item in answer["output"]] == [None, "add", "echo", None]
    grammars = [asked.guidance.grammar for asked in site.engine.asked]
    assert "echo" not in grammars[0]
    assert "echo" in grammars[1]  # once the call is made, the model is free
    ask(site, "Hm.", tool_choice={"type": "mcp", "server_label": "tools"})
    assert "echo" in site.engine.asked[0].guidance.grammar
    listed = {"type": "allowed_tools", "mode": "auto", "tools": [{**choice, "name": "echo"}]}
    ask(site, "Hm.", tool_choice=listed)
    assert '"add"' not in site.engine.asked[0].guidance.grammar


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "mcp", "server_label": "other"}, "tool_choice.server_label"),
        ({"type": "mcp", "server_label": "tools", "name": "sub"}, "tool_choice.name"),
        ({"type": "mcp"}, "tool_choice.server_label"),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(site: Any, choice: Any, param: str) -> None:
    assert refusal(site, tool_choice=choice)["param"] == param


def test_a_required_call_without_a_tool_is_refused(site: Any) -> None:
    assert refusal(site, tools=[mcp("down")], tool_choice="required")["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("tool", "member", "text"),
    [
        (
            {"server_url": "http://169.254.169.254/mcp"},
            "server_url",
            "operator lists in the setting mcp_servers (tools, bad",
        ),
        ({"server_label": "unknown"}, "server_url", "got label 'unknown'"),
        ({"connector_id": "connector_gmail"}, "connector_id", "not supported"),
        ({"tunnel_id": "t"}, "tunnel_id", "not supported"),
        ({"defer_loading": True}, "defer_loading", "not supported"),
        ({"allowed_callers": ["programmatic"]}, "allowed_callers", "not supported"),
        ({"name": "x"}, "name", "not a member of tools of type mcp"),
        ({"headers": {"Host": "x"}}, "headers", "may not set 'Host'"),
        ({"headers": {"X-A": "a\r\nX-B: b"}}, "headers", "visible ASCII"),
        ({"server_label": "keyed", "headers": {"x-key": "mine"}}, "headers", "may not set 'x-key'"),
        ({"headers": {"Authorization": "a"}, "authorization": "b"}, "authorization", "may not set"),
        ({"server_label": None}, "server_label", "required"),
    ],
)
def test_what_a_tool_may_not_say_is_refused_by_name(
    site: Any, real: RealServer, tool: dict[str, Any], member: str, text: str
) -> None:
    error = refusal(site, tools=[mcp(**tool)])
    assert error["param"] == f"tools[0].{member}"
    assert text in error["message"]
    assert real.headers == []


def test_other_faults_are_refused(site: Any, make_site: Any, monkeypatch: Any) -> None:
    assert refusal(site, tools=[mcp(), mcp()])["param"] == "tools[1].server_label"
    assert refusal(site, tools=[{**WEATHER, "server_label": "x"}])["param"] == "tools[0].server_label"
    answer = [{"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}]
    assert refusal(site, input=answer)["param"] == "input[0].approval_request_id"
    request = {"type": "mcp_approval_request", "id": "mcpr_1", "name": "x", "server_label": "gone", "arguments": "{}"}
    assert refusal(site, input=[request, *answer])["param"] == "input[1].approval_request_id"
    assert refusal(make_site())["message"].endswith("mcp_servers (none), got label 'tools'")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'weft[mcp]'" in refusal(site)["message"]


def test_headers_reach_the_server_and_nobody_else(site: Any, real: RealServer, url_of: dict[str, Any]) -> None:
    tool = mcp("mine", server_url=f"{url_of['tools']}?keyed", authorization="secret", headers={"X-User": "u1"})
    answer = ask(site, call("echo", text="x"), "Ok.", tools=[tool])
    assert answer["output"][1]["output"] == "x"
    for headers in real.headers:
        assert (headers["x-key"], headers["x-user"], headers["authorization"]) == ("k1", "u1", "Bearer secret")
    stored = site.call("GET", f"/v1/responses/{answer['id']}").text
    assert "secret" not in stored
    assert "u1" not in json.dumps(answer["tools"])


def test_a_redirect_to_another_server_is_not_followed(hosts: Any, real: RealServer, url_of: dict[str, Any]) -> None:
    async def elsewhere(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = [(b"location", url_of["tools"].encode()), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 307, "headers": headers})
            await send({"type": "http.response.body", "body": b""})

    with serve(elsewhere) as url:
        site = hosts()
        site.settings = site.settings.model_copy(
            update={"mcp_servers": {"tools": site.settings.mcp_servers["tools"].model_copy(update={"url": url})}}
        )
        site.rebuild()
        answer = ask(site, "Hm.")
    assert answer["output"][0]["error"]
    assert real.headers == []


def test_tokens_are_counted_with_the_tools(site: Any) -> None:
    reply = site.call("POST", "/v1/responses/input_tokens", json={"input": "Hi", "tools": [mcp()]})
    assert reply.status == 200
    assert site.tokenizer.variables["tools"][0]["function"]["name"] == "add"


def test_no_more_servers_and_tools_than_the_bounds(site: Any) -> None:
    """26,000 equal names took minutes on the event loop, and as many labels opened as many connections."""
    error = refusal(site, tools=[mcp(f"s{i}", server_url=url_of_tools(site)) for i in range(17)])
    assert (error["param"], "at most 16 tools of type mcp" in error["message"]) == ("tools", True)
    tools = [{"name": "a", "input_schema": {}} for _ in range(1025)]
    error = refusal(site, input=[{"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "tools", "tools": tools}])
    assert (error["param"], "at most 1024 tools, got 1025" in error["message"]) == ("input[0].tools", True)


def test_a_schema_that_is_none_loosens_that_tool_alone(site: Any) -> None:
    """A server whose tool had such a schema was of no use: each request that named the server got 400."""
    schemas = {
        "odd": {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)"}, "n": {"type": "int"}}},
        "none": {"type": "array", "properties": 5},
        "good": {"type": "object", "properties": {"x": {"type": "string", "maxLength": 7}}},
    }
    listed = [{"name": name, "input_schema": schema} for name, schema in schemas.items()]
    listing = {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "tools", "tools": listed}
    reply = site.call(
        "POST", "/v1/responses", json={"tools": [mcp()], "input": [listing, {"role": "user", "content": "Hi"}]}
    )
    assert reply.status == 200
    assert (
        reply.headers["x-ignored-params"]
        == "tools.odd.input_schema.properties.x.pattern,tools.none.input_schema.properties,tools.none.input_schema.type"
    )
    grammar = site.engine.asked[0].guidance.grammar
    assert "maxLength" in grammar and "integer" in grammar
    schemas["none"]["properties"] = {}  # templates go through it
    assert [tool["function"]["parameters"] for tool in site.tokenizer.variables["tools"]] == [*schemas.values()]


def url_of_tools(site: Any) -> str:
    return str(site.app.state.context.settings.mcp_servers["tools"].url)


def test_an_unlisted_server_is_told_no_addresses(site: Any) -> None:
    error = refusal(site, tools=[mcp("x", server_url="http://127.0.0.1:1/mcp")])
    assert "tools" in error["message"] and url_of_tools(site) not in error["message"]


def test_what_was_called_is_not_called_again_after_a_failure(site: Any, real: RealServer) -> None:
    """An error status made clients try again, and the tool ran up to three times."""
    site.engine.answers, site.engine.asked = [call("add", a=2, b=3)], []
    begin, count = site.engine.generate, iter(range(10))

    async def generate(request: Any) -> Any:
        if next(count):
            raise QueueFullError("full")
        return await begin(request)

    site.engine.generate = generate
    reply = site.call("POST", "/v1/responses", json={"input": "Hi", "tools": [mcp()]})
    assert (reply.status, reply.json["status"], real.calls) == (200, "failed", ["add"])
    assert reply.json["error"]["code"] == "server_error"


def test_one_decision_for_each_call(site: Any, real: RealServer) -> None:
    asked = {"type": "mcp_approval_request", "id": "mcpr_1", "name": "echo", "server_label": "tools", "arguments": "{}"}
    no, yes = (
        {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": approve}
        for approve in (False, True)
    )
    error = refusal(site, input=[asked, no, yes])
    assert (error["param"], "a second time" in error["message"]) == ("input[2].approval_request_id", True)
    error = refusal(site, input=[asked, yes], tools=[{"type": "function", "name": "f"}])
    assert "which tools must hold" in error["message"]
    answer = ask(site, "Hm.", input=[asked, yes], prompt_cache_options={"prewarm": True})
    assert (types(answer), real.calls) == (["mcp_list_tools"], [])


def test_a_server_that_is_down_leaves_the_others_usable(site: Any) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "down"}]}
    answer = ask(site, "Hm.", tools=[mcp("down"), mcp()], tool_choice=allowed)
    assert types(answer) == ["mcp_list_tools", "mcp_list_tools", "message"]
