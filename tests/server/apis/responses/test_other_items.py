"""Items of POST /v1/responses that another server made: they stay in the conversation, as calls or as text."""

from typing import Any

import pytest

from weft.server.apis.responses.input import InputItem, input_messages
from weft.server.apis.responses.schema import OtherItem, ResponseItem
from weft.server.apis.responses.stored import items_to_store

USER = {"role": "user", "content": "Hi"}


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    given = [InputItem(ResponseItem.model_validate(each), f"input[{i}]") for i, each in enumerate([USER, *items])]
    made = input_messages(given, None, None, None, shows_old_reasoning=True, unseal=lambda kind, text: None)
    return made.messages[1:]


SHELL = {"type": "exec", "command": ["ls"], "env": {}}


@pytest.mark.parametrize(
    ("call", "output", "name", "arguments", "text"),
    [
        (
            {"type": "local_shell_call", "id": "i", "call_id": "c", "status": "completed", "action": SHELL},
            {"type": "local_shell_call_output", "id": "c", "output": "a\nb"},
            "local_shell",
            {"action": SHELL},
            "a\nb",
        ),
        (
            {"type": "local_shell_call", "call_id": "c", "action": SHELL},
            {"type": "function_call_output", "call_id": "c", "output": "a"},
            "local_shell",
            {"action": SHELL},
            "a",
        ),
        (
            {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "q"}},
            {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [{"name": "t"}]},
            "tool_search",
            {"query": "q"},
            '{"tools":[{"name":"t"}]}',
        ),
        (
            {"type": "shell_call", "call_id": "c", "status": "odd", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "outcome": {"exit_code": 0}}]},
            "shell",
            {"action": {"commands": ["ls"]}},
            '[{"stdout":"a","outcome":{"exit_code":0}}]',
        ),
    ],
)
def test_a_call_with_an_output_becomes_a_call(
    call: dict[str, Any], output: dict[str, Any], name: str, arguments: Any, text: str
) -> None:
    turn, answer = messages(call, output)
    assert turn["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}]
    assert answer == {"role": "tool", "content": text, "tool_call_id": "c"}


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (
            {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
            'web_search_call: {"action":{"type":"search","query":"q"}}',
        ),
        (
            {"type": "image_generation_call", "id": "ig", "status": "generating", "result": "A" * 5000},
            'image_generation_call: {"result":"(5000 characters)"}',
        ),
        ({"type": "mcp_of_tomorrow", "id": 3, "status": 7}, "mcp_of_tomorrow: {}"),
        ({"type": "x_output", "call_id": "nobody", "output": "o"}, 'x_output: {"output":"o"}'),
    ],
)
def test_everything_else_becomes_text(item: dict[str, Any], text: str) -> None:
    assert messages(item) == [{"role": "assistant", "content": text}]
    said = {"type": "message", "role": "assistant", "content": "Done."}
    assert [each["content"] for each in messages(said, item)] == [f"Done.\n{text}"]


def test_an_item_is_stored_as_it_came() -> None:
    given = {"type": "web_search_call", "status": "odd", "action": {"a": None}}
    item = ResponseItem.model_validate(given)
    assert isinstance(item, OtherItem)
    (stored,) = items_to_store([item], "resp_1")
    assert stored == {**given, "id": stored["id"]}


def test_a_depth_that_cannot_be_written_is_refused(site: Any) -> None:
    deep: Any = "x"
    for _ in range(400):
        deep = [deep]
    reply = site.call("POST", "/v1/responses", json={"input": [USER, {"type": "odd", "deep": deep}], "store": False})
    assert reply.status in (200, 400)


@pytest.mark.parametrize(
    ("members", "shown", "left_out"),
    [
        ({"encrypted_content": "gAAAforeign"}, None, True),
        ({"encrypted_content": "ünlesbar"}, None, True),
        ({"encrypted_content": "gAAA", "summary": [{"type": "summary_text", "text": "SUM"}]}, "SUM", True),
        ({"encrypted_content": "gAAA", "content": [{"type": "reasoning_text", "text": "T"}]}, "T", False),
        ({"encrypted_content": ""}, None, False),
        ({"encrypted_content": None, "summary": None, "content": None}, None, False),
        ({"id": None, "encrypted_content": "gAAA", "content": []}, None, True),
    ],
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
def test_reasoning_that_cannot_be_read_is_left_out(
    site: Any, members: dict[str, Any], shown: str | None, left_out: bool, path: str
) -> None:
    items = [USER, {"type": "reasoning", "id": "rs_1", "summary": [], **members}, USER]
    reply = site.call("POST", path, json={"input": items, "store": False})
    assert reply.status == 200
    assert ("input[1].encrypted_content" in reply.headers.get("x-ignored-params", "")) is left_out
    if path == "/v1/responses":
        thoughts = [each.get("reasoning_content") for each in site.tokenizer.rendered if each["role"] == "assistant"]
        assert thoughts == ([shown] if shown else [])


def test_a_compaction_that_cannot_be_read_is_refused(site: Any) -> None:
    items = [{"type": "compaction", "encrypted_content": "gAAAforeign"}, USER]
    reply = site.call("POST", "/v1/responses", json={"input": items, "store": False})
    assert (reply.status, reply.error["param"]) == (400, "input[0].encrypted_content")


@pytest.mark.parametrize("input", [[], "", None])
@pytest.mark.parametrize("probe", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}])
def test_a_probe_without_input_is_answered(site: Any, input: Any, probe: dict[str, Any]) -> None:
    reply = site.call("POST", "/v1/responses", json={"input": input, "store": False, **probe})
    assert (reply.status, reply.json["status"], reply.json["output"]) == (200, "completed", [])
    assert site.engine.asked[-1].params.max_tokens == 0
    assert site.tokenizer.rendered == [{"role": "user", "content": ""}]
