"""What MCP servers list and answer: one odd tool or answer costs what it is worth, and no more."""

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.chat_templates_for_tests import QWEN3
from tests.server.mcp_servers import listing, serve
from weft.server.apis.responses.mcp_client import MAX_LEFT_OUT, McpConnection, McpFailure, list_tools
from weft.server.apis.responses.mcp_tools import HostedFunction
from weft.server.apis.responses.tools import presentable
from weft.server.task.schema import FunctionDefinition
from weft.server.task.tool_use import HostedTool
from weft.server.text.chat_template import ChatTemplate, ChatTemplateError

SCHEMAS: dict[str, Any] = {
    "lookahead": {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}},
    "patterns": {"type": "object", "patternProperties": {"^(?!x)": {"type": "string"}, "^a": {}, "a$": {}}},
    "dangling": {"type": "object", "properties": {"x": {"$ref": "#/$defs/none"}}},
    "elsewhere": {"type": "object", "properties": {"x": {"$ref": "https://example.com/x.json"}}},
    "itself": {"$ref": "#"},
    "money": {"type": "object", "properties": {"x": {"type": "money"}}},
    "order": {"type": "object", "properties": {"x": {"type": "integer", "minimum": 5, "maximum": 1}}},
    "lengths": {"type": "object", "properties": {"x": {"type": "string", "minLength": -5, "maxLength": 1e300}}},
    "array": {"type": "array"},
    "listed": {"type": "object", "properties": ["a", "b"]},
    "nothing": {"type": "object", "properties": None, "required": None},
    "words": {"type": "object", "properties": {"x": "string", "y": None, "z": 5, "w": True}, "required": "x"},
    "closed": {"type": "object", "properties": {}, "required": ["q"], "additionalProperties": False},
    "empty": {},
    "numbers": {"type": "object", "title": 5, "properties": {"x": {"type": "string", "description": 7}}},
    "circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
}
ODD: list[Any] = [
    *({"inputSchema": {}}, {"name": 5, "inputSchema": {}}, {"name": "", "inputSchema": {}}, None, "x", [1]),
    {"name": "x" * 257, "inputSchema": {}},
]
"""Tools without a name that a model could be told."""
HALF: dict[str, Any] = {
    "none": {},
    "text": {"inputSchema": "x"},
    "list": {"inputSchema": [1]},
    "described": {"inputSchema": {}, "description": 5},
    "annotated": {"inputSchema": {}, "annotations": "x", "outputSchema": "x", "_meta": 5, "icons": 7},
}


def connection(url: str, **changes: Any) -> McpConnection:
    return McpConnection(
        **{"label": "raw", "url": url, "headers": {}, "timeout_s": 60, "max_bytes": 100_000, **changes}
    )


def test_an_odd_tool_is_taken_as_far_as_it_goes_and_the_others_whole() -> None:
    """The whole list was refused for one of them."""
    tools = [{"name": name, "inputSchema": schema} for name, schema in SCHEMAS.items()]
    tools += [*ODD, *({"name": name, **members} for name, members in HALF.items())]
    with serve(listing(tools)) as url:
        listed = asyncio.run(list_tools(connection(url)))
    assert [(tool.name, tool.input_schema) for tool in listed.tools] == [*SCHEMAS.items(), *((n, {}) for n in HALF)]
    assert {tool.description for tool in listed.tools} == {None}
    first, half = len(SCHEMAS), len(SCHEMAS) + len(ODD)
    members = ["", ".inputSchema", ".inputSchema", ".description", ".annotations"]
    assert listed.left_out == [
        *(f"raw.tools[{first + i}]" for i in range(len(ODD))),
        *(f"raw.tools[{half + i}]{member}" for i, member in enumerate(members) if member),
    ]


def test_a_request_goes_on_with_odd_tools_and_says_what_is_left_out(make_site: Any) -> None:
    tools = [{"name": name, "inputSchema": schema} for name, schema in SCHEMAS.items()]
    with serve(listing([*tools, *ODD])) as url:
        site = make_site(mcp_servers={"raw": url}, mcp_max_bytes="100000")
        site.tokenizer.template = QWEN3
        site.rebuild()
        used = [{"type": "mcp", "server_label": "raw", "require_approval": "never"}]
        reply = site.call("POST", "/v1/responses", json={"input": "Hi", "tools": used})
    assert reply.status == 200, reply.text
    item = reply.json["output"][0]
    assert (item["error"], [tool["name"] for tool in item["tools"]]) == (None, [*SCHEMAS])
    ignored = reply.headers["x-ignored-params"]
    for name in ("lookahead", "patterns", "dangling", "elsewhere", "itself", "money", "order", "array", "listed"):
        assert f"raw.{name}.input_schema" in ignored
    assert ignored.count("raw.tools[") == len(ODD)


def test_paths_of_what_is_left_out_are_bounded() -> None:
    with serve(listing(ODD * 20)) as url:
        listed = asyncio.run(list_tools(connection(url)))
    assert (listed.tools, len(listed.left_out)) == ([], MAX_LEFT_OUT)


UNREADABLE = {
    "half a surrogate": rb'{"name": "x", "description": "\ud800"}',
    "the other half": rb'{"name": "x", "inputSchema": {"title": "\udfff a"}}',
    "a name": rb'{"name": "\ud83d"}',
    "levels": b'{"name": "x", "inputSchema": {"properties": ' + b'{"x":' * 150 + b"1" + b"}" * 150 + b"}}",
    "more levels": b'{"name": "x", "inputSchema": {"enum": ' + b"[" * 2000 + b"]" * 2000 + b"}}",
    "very many levels": b'{"name": "x", "inputSchema": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
    "digits": b'{"name": "x", "inputSchema": {"maximum": ' + b"9" * 5000 + b"}}",
    "digits below": b'{"name": "x", "inputSchema": {"properties": {"a": {"enum": [-' + b"1" * 9000 + b"]}}}}",
    "exponent": b'{"name": "x", "inputSchema": {"maximum": 1e999999}}',
    "no number": b'{"name": "x", "inputSchema": {"maximum": NaN}}',
    "control": b'{"name": "x", "description": "a\x01b"}',
}


@pytest.mark.parametrize("is_stream", [False, True], ids=["json", "events"])
@pytest.mark.parametrize("tool", UNREADABLE.values(), ids=UNREADABLE)
def test_a_tool_that_cannot_be_read_is_left_out_alone(tool: bytes, is_stream: bool) -> None:
    """The whole list was refused: the package takes a message as a whole or not at all."""
    good = {"name": "good", "description": 'quoted \\" [{', "inputSchema": {"type": "object"}}
    with serve(listing([good, "STAND-IN", good], {b'"STAND-IN"': tool}, is_stream=is_stream)) as url:
        listed = asyncio.run(list_tools(connection(url)))
    assert [tool.name for tool in listed.tools] == ["good", "good"]
    assert listed.tools[0].description == good["description"]
    assert listed.left_out == ["raw.tools[1]"]


@pytest.mark.parametrize(
    "text",
    ["[" * 500_000, '{"a":' * 200_000, '"' + '\\"' * 500_000, '"a' * 500_000, "[[[" + "{}," * 300_000, "\\" * 900_000],
    ids=["lists", "objects", "a text without an end", "texts", "tools", "no JSON"],
)
def test_what_cannot_be_read_takes_no_time(text: str) -> None:
    from weft.server.http.mcp_session import _mended

    began = time.thread_time()
    _mended(text)
    assert time.thread_time() - began < 1.5


@pytest.mark.parametrize("text", ["x" * 200_000, "word " * 40_000, "\u00e4" * 3000])
def test_a_tool_that_fills_the_context_is_left_out_alone(make_site: Any, text: str) -> None:
    """Every request with its server was a 400."""
    tools = [{"name": "good", "inputSchema": {}}, {"name": "long", "inputSchema": {}, "description": text}]
    with serve(listing(tools)) as url:
        site = make_site(mcp_servers={"raw": url})
        site.tokenizer.template = QWEN3
        site.rebuild()
        used = [{"type": "mcp", "server_label": "raw", "require_approval": "never"}]
        reply = site.call("POST", "/v1/responses", json={"input": "Hi", "tools": used})
    assert reply.status == 200, reply.text
    assert "raw.long.input_schema" in reply.headers["x-ignored-params"]
    assert "raw.good" not in reply.headers["x-ignored-params"]
    assert [tool["function"]["name"] for tool in site.tokenizer.variables["tools"]] == ["good"]


STRICT_TEMPLATE = """
{%- for tool in tools or [] -%}
{%- if tool.function.name == "never" -%}{{ raise_exception("not this one") }}{%- endif -%}
{%- for name, spec in tool.function.parameters.properties.items() -%}{{ name + ": " + spec.description + spec.type }}
{% endfor -%}{%- endfor -%}
{%- for message in messages -%}{{ message.role + ": " + message.content }}{%- endfor -%}
"""


def hosted(name: str, schema: dict[str, Any]) -> HostedFunction:
    function = FunctionDefinition.model_construct(name=name, parameters=schema, description=None, strict=None)
    return HostedFunction(function, HostedTool("raw", name, needs_approval=False))


def can_show_by(source: str) -> Any:
    template = ChatTemplate(source)

    def can_show(tools: list[dict[str, object]]) -> bool:
        try:
            template.render([{"role": "user", "content": "Hi"}], True, {"tools": tools}, repairs=False)
        except ChatTemplateError:
            return False
        return True

    return can_show


def test_a_function_that_the_template_cannot_show_is_declared_with_less_or_left_out_alone() -> None:
    """Every request with that server was a 400: the template adds texts, and takes the members of an object."""
    good = {"type": "object", "properties": {"x": {"type": "string", "description": "it"}}}
    given = [hosted("good", good), hosted("never", good), *(hosted(name, SCHEMAS[name]) for name in SCHEMAS)]
    kept, left_out = presentable(given, can_show_by(STRICT_TEMPLATE.replace("spec.type", "''")), bool)
    assert [each.function.name for each in kept] == ["good", *SCHEMAS]
    assert kept[0] == given[0]
    assert "raw.never.input_schema" in left_out
    assert {"raw.good.input_schema", "raw.listed.input_schema"}.isdisjoint(left_out)  # lists are no members
    assert presentable(given[:1], can_show_by(STRICT_TEMPLATE), bool) == (given[:1], [])


def test_a_template_that_refuses_every_tool_says_so_itself() -> None:
    given = [hosted("good", {"type": "object"})]
    assert presentable(given, can_show_by("{{ raise_exception('no') }}"), bool) == (given, [])


def answering(status: int, headers: dict[str, str], pieces: Any) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            head = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": status, "headers": head})
            async for piece in pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    return app


def endless(piece: bytes, pause_s: float = 0.0) -> Any:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield piece
            await asyncio.sleep(pause_s)

    return pieces


def once(piece: bytes) -> Any:
    async def pieces() -> AsyncIterator[bytes]:
        yield piece

    return pieces


EVENTS, JSON = {"content-type": "text/event-stream"}, {"content-type": "application/json"}
PLACE = "http://10.1.2.3:8080/inside"
HOSTILE: dict[str, tuple[Any, str]] = {
    "endless": (answering(200, JSON, endless(b"x" * (1 << 16))), "more than 100000 bytes"),
    "endless events": (answering(200, EVENTS, endless(b"x" * (1 << 16))), "more than 100000 bytes"),
    "tiny pieces": (answering(200, EVENTS, endless(b"\n")), "more than 100000 bytes"),
    "slow": (answering(200, EVENTS, endless(b":", 0.1)), "did not answer within 2 s"),
    "packed": (answering(200, {**JSON, "content-encoding": "gzip"}, once(gzip.compress(bytes(1 << 22)))), "reached"),
    "redirect": (answering(307, {"location": PLACE}, once(b"")), "MCP"),
    "page": (answering(200, {"content-type": "text/html"}, once(b"<p>secret-words")), "MCP"),
    "half": (answering(200, JSON, once(b'{"secret-words": [')), "MCP"),
    "shape": (listing("secret-words"), "MCP"),
    "refusal": (answering(401, {"content-type": "text/plain"}, once(b"secret-words")), "error"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_answer_is_bounded_and_what_is_no_mcp_stays_here(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Clients were told where a server redirects to, and the beginning of what it says that is no MCP."""
    app, words = HOSTILE[kind]
    latest = worst = time.monotonic()

    async def ask(url: str) -> McpFailure:
        async def beat() -> None:
            nonlocal latest, worst
            latest, worst = time.monotonic(), 0.0
            while True:
                await asyncio.sleep(0.01)
                worst, latest = max(worst, time.monotonic() - latest), time.monotonic()

        beating = asyncio.create_task(beat())
        try:
            with pytest.raises(McpFailure) as caught:
                await list_tools(connection(f"{url}?key=secret-key", timeout_s=2))
        finally:
            beating.cancel()
        return caught.value

    with serve(app) as url:
        begin = time.monotonic()
        failure = asyncio.run(ask(url))
        assert time.monotonic() - begin < 30
    told = json.dumps(failure.error)
    assert words in told
    for word in ("secret", "10.1.2.3", "127.0.0.1", "pydantic"):
        assert word not in told
    (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("mcp_client")]
    assert "\n" not in line and len(line) < 1500
    assert worst < 5, "the event loop goes on"
