"""POST /v1/messages as agents send it: what nobody here needs does not end their work."""

from typing import Any

import pytest

from tests.chat_templates_for_tests import QWEN3

ASK: Any = [{"role": "user", "content": "Hi"}]
BILLING = "x-anthropic-billing-header: cc_version=2.1.3; cc_entrypoint=cli; cch=a1b2c;"


def send(site: Any, path: str = "/v1/messages", **body: Any) -> Any:
    return site.call("POST", path, json={"max_tokens": 9, "messages": ASK, **body})


def text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


@pytest.mark.parametrize(
    ("system", "shown"),
    [
        (f"{BILLING}\nBe brief.", "Be brief."),
        (f"{BILLING.title()}\r\nBe brief.", "Be brief."),
        ([text(BILLING), text("Be"), text("brief.")], "Be\nbrief."),
        ([text(f"{BILLING}\n"), text("Be brief.")], "Be brief."),
        ([text(f"{BILLING}\nBe"), text("brief.")], "Be\nbrief."),
        ([text("Be"), text(f"\n{BILLING}\nbrief.")], "Be\nbrief."),
        (f"About {BILLING}\nBe brief.", f"About {BILLING}\nBe brief."),
        (BILLING, None),
        ([text(BILLING)], None),
    ],
)
def test_the_line_for_billing_does_not_reach_the_prompt(site: Any, system: Any, shown: str | None) -> None:
    assert send(site, system=system).status == 200
    assert [each["content"] for each in site.tokenizer.rendered if each["role"] == "system"] == [shown][
        : shown is not None
    ]


def test_a_breakpoint_behind_the_line_stays_where_its_text_ends(site: Any) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    pins = []
    for system in ([text("Be brief.", **mark)], [text(BILLING), text("Be brief.", **mark)]):
        send(site, system=system)
        pins.append(site.engine.asked[-1].caching.pins)
    assert pins[0] == pins[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x" * 3000}]},
        {"system": "x" * 3000},
        {"messages": [{"role": "user", "content": "x" * (999 - len("user: \nassistant:"))}]},  # one more than there is
    ],
)
def test_a_prompt_that_is_too_long_is_said_in_the_words_that_clients_know(site: Any, body: Any, stream: bool) -> None:
    reply = send(site, stream=stream, **body)
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    words = reply.json["error"]["message"].split()
    assert words[:4] == ["prompt", "is", "too", "long:"]
    assert (words[5:7], words[7:9]) == (["tokens", ">"], ["999", "maximum:"])
    assert int(words[4]) > 999
    assert reply.json["error"]["details"] == {"error_code": "context_length_exceeded"}


def test_what_does_not_fit_is_counted(site: Any) -> None:
    reply = send(site, "/v1/messages/count_tokens", messages=[{"role": "user", "content": "x" * 3000}])
    assert reply.json == {"input_tokens": 1 + len("user: \nassistant:") + 3000}


FOREIGN = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8, "allowed_domains": None},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "mcp_toolset", "mcp_server_name": 3},
    {"type": "of tomorrow", "name": ["x"], "description": 3},
]


@pytest.mark.parametrize("tool", FOREIGN)
def test_a_tool_that_nobody_hosts_is_left_out_and_named(make_site: Any, tool: Any) -> None:
    own = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
    for strict in (False, True):
        site = make_site(strict_params=strict)
        site.tokenizer.template = QWEN3
        site.rebuild()
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            reply = (
                send(site, path, tools=[own, tool])
                if path == "/v1/messages"
                else site.call("POST", path, json={"messages": ASK, "tools": [own, tool]})
            )
            assert reply.status == (400 if strict else 200)
            if strict:
                assert f"tools[1].type cannot be '{tool['type']}'" in reply.json["error"]["message"]
                continue
            assert f"tools[1].type={tool['type'].replace(' ', '%20')}" in reply.headers["x-ignored-params"].split(",")
            assert [each["function"]["name"] for each in site.tokenizer.variables["tools"]] == ["f"]


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ({"thinking": {"type": "adaptive"}}, ""),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, ""),
        ({"thinking": {"type": "of tomorrow"}}, "thinking.type=of%20tomorrow"),
        ({"thinking": {"type": "adaptive", "display": "odd"}}, "thinking.display=odd"),
        ({"thinking": {"type": "disabled"}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort=huge"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, "context_management"),
        ({"metadata": {"user_id": "u"}}, "metadata"),
        ({"metadata": {"user_id": None, "session": 3}}, "metadata,metadata.session"),
        ({"betas": ["of-tomorrow-2027-01-01"], "speed": "fast", "inference_geo": "eu"}, "betas,inference_geo,speed"),
    ],
)
def test_what_has_no_effect_is_reported_and_not_refused(site: Any, body: Any, ignored: str) -> None:
    reply = site.call(
        "POST",
        "/v1/messages?beta=true",
        json={"max_tokens": 9, "messages": ASK, **body},
        headers={"anthropic-beta": "of-tomorrow-2027-01-01,claude-code-20250219"},
    )
    assert reply.status == 200
    assert sorted(filter(None, reply.headers.get("x-ignored-params", "").split(","))) == sorted(
        filter(None, ignored.split(","))
    )


def test_what_tools_wrote_elsewhere_becomes_text(site: Any) -> None:
    use = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}}
    page = {"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "E" * 9000}
    result = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [page]}
    failed = {"type": "web_fetch_tool_result", "tool_use_id": "x", "content": {"type": "error", "error_code": "no"}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "tool_reference", "tool_name": "g"}]}
    turns = [*ASK, {"role": "assistant", "content": [text("Look."), use, result, failed, call]}]
    assert send(site, messages=[*turns, {"role": "user", "content": [found]}]).status == 200
    assert [each["content"] for each in site.tokenizer.rendered][1:] == [
        'Look.\nserver_tool_use: {"name":"web_search","input":{"query":"q"}}\n'
        'web_search_tool_result: {"content":[{"type":"web_search_result","url":"u","title":"t"}]}\n'
        'web_fetch_tool_result: {"content":{"type":"error","error_code":"no"}}',
        'tool_reference: {"tool_name":"g"}',
    ]


@pytest.mark.parametrize("block", [{"type": "thinking", "thinking": None}, {"type": "thinking", "thinking": ""}])
def test_reasoning_that_is_empty_is_left_out(site: Any, block: Any) -> None:
    turn = {"role": "assistant", "content": [{**block, "signature": "s"}, text("Hello.")]}
    assert send(site, messages=[*ASK, turn, *ASK]).status == 200
    assert site.tokenizer.rendered[1] == {"role": "assistant", "content": "Hello."}


def test_a_schema_that_cannot_be_followed_whole_is_followed_as_far_as_it_can(site: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    }
    site.engine.answers = ['{"a": []}']
    assert send(site, output_config={"format": {"type": "json_schema", "schema": schema}}).status == 200
