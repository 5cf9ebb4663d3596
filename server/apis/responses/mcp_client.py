"""Lists and calls the tools of an MCP server: one connection for each, bounded in time and bytes.

A server that is down, hangs, answers garbage or too much is a `McpFailure`, in the words of the Responses API. Clients
are told what a server says to its callers: tools, results, errors in MCP. How it was reached, and what it says that is
no MCP, is in the log alone. What a client may reach is decided by `weft.server.apis.responses.mcp_tools`. The types of
`mcp` have no names here, for it may be missing.
"""

import asyncio
import importlib.util
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec

from weft.server.apis.responses.answers import McpTool
from weft.server.text.shield import one_line

MAX_LISTED = 1024
"""Most tools that a server may list."""
MAX_NAME_CHARS = 256
"""Of a tool; one with a longer name is left out."""
MAX_LEVELS = 64
"""Of a tool's objects and lists; one with more is left out: not every chat template can show them."""
MAX_LEFT_OUT = 64
"""Most paths that are reported of one server."""
MAX_MESSAGE_CHARS = 1000
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class McpConnection:
    """Where a server is, what it is told about the caller, and how long and how much it may answer."""

    label: str
    url: str
    headers: Mapping[str, str] = field(repr=False)
    timeout_s: float
    max_bytes: int


class Outcome(NamedTuple):
    """What became of a call: an output, or an error in the API's shape."""

    output: str | None
    error: dict[str, Any] | None = None


class McpFailure(Exception):  # not an error of this server: it becomes an item
    """The server did not do what it was asked for. `error` is the object that the API shows."""

    def __init__(self, kind: str, code: int, message: str) -> None:
        super().__init__(message)
        self.error = {"type": kind, "code": code, "message": message[:MAX_MESSAGE_CHARS]}


def is_installed() -> bool:
    """Whether the `mcp` package is there."""
    return importlib.util.find_spec("mcp") is not None


class Listed(NamedTuple):
    """The tools of a server, and the paths of what it lists that is none, or not as MCP asks for."""

    tools: list[McpTool]
    left_out: list[str]


async def list_tools(connection: McpConnection) -> Listed:
    """All tools of a server. One that is odd is taken as far as it goes, or left out alone.

    Raises:
        McpFailure: There is no list.
    """

    async def work(client: Any) -> list[Any]:
        from weft.server.http.mcp_session import GIVEN

        given: list[Any] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            given += [(tool.meta or {}).get(GIVEN) for tool in page.tools]
            if len(given) > MAX_LISTED:
                raise McpFailure("http_error", 502, f"the server lists more than {MAX_LISTED} tools")
            cursor = page.next_cursor
            if not cursor:
                return given

    listed = Listed([], [])
    for i, tool in enumerate(await _run(connection, work)):
        _take_tool(tool, f"{connection.label}.tools[{i}]", listed)
    del listed.left_out[MAX_LEFT_OUT:]
    return listed


def _take_tool(given: Any, at: str, listed: Listed) -> None:
    """Read a tool. What it says that MCP does not allow is left out: a member, or if it has no name, the tool."""
    name = given.get("name") if isinstance(given, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not _is_flat(given):
        listed.left_out.append(at)
        return
    members: dict[str, Any] = {}
    for member, kind in (("inputSchema", dict), ("description", str), ("annotations", dict)):
        members[member] = given.get(member)
        if not isinstance(members[member], kind):
            if members[member] is not None:
                listed.left_out.append(f"{at}.{member}")
            members[member] = None
    listed.tools.append(McpTool(name, members["inputSchema"] or {}, members["description"], members["annotations"]))


def _is_flat(value: object) -> bool:
    """Whether it has at most MAX_LEVELS levels."""
    level = [value]
    for _ in range(MAX_LEVELS):
        values = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [item for each in values for item in each]
    return not any(isinstance(each, dict | list) for each in level)


async def call_tool(connection: McpConnection, name: str, arguments: str) -> Outcome:
    """Call a tool. `arguments` is the model's text."""
    try:
        parsed = msgspec.json.decode(arguments)  # it refuses NaN and Infinity, which would arrive as null
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        return Outcome(None, McpFailure("mcp_protocol_error", -32602, "the arguments are no JSON object").error)

    async def work(client: Any) -> Outcome:
        from mcp.types import CallToolRequest, CallToolRequestParams, CallToolResult

        # Not `client.call_tool`: it would list the tools again, to hold the result against their schemas.
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=parsed))
        return _outcome(await client.session.send_request(request, CallToolResult))

    try:
        return await _run(connection, work)
    except McpFailure as failure:
        return Outcome(None, failure.error)


async def _run(connection: McpConnection, work: Callable[[Any], Awaitable[_T]]) -> _T:
    await asyncio.to_thread(importlib.import_module, "mcp")  # takes a second, the first time
    from weft.server.http.mcp_session import BoundedTransport, open_client

    transport = BoundedTransport(connection.url, connection.max_bytes)
    try:
        async with (
            asyncio.timeout(connection.timeout_s),
            open_client(connection.url, connection.headers, transport, connection.max_bytes) as client,
        ):
            return await work(client)
    except Exception as exc:
        failure = _failure(connection, exc, is_exceeded=transport.is_exceeded)
        detail = one_line("; ".join(str(leaf) or type(leaf).__name__ for leaf in _leaves(exc)), 1000)
        _log.warning("MCP server %s: %s (%s)", connection.label, one_line(str(failure)), detail)
        raise failure from None


def _failure(connection: McpConnection, exc: Exception, *, is_exceeded: bool) -> McpFailure:
    """The failure for any exception. Task groups wrap what happens in them."""
    from mcp import MCPError
    from mcp.types import INVALID_REQUEST, PARSE_ERROR

    if is_exceeded:
        return McpFailure("http_error", 413, f"the server answered with more than {connection.max_bytes} bytes")
    if isinstance(exc, TimeoutError):
        return McpFailure("http_error", 504, f"the server did not answer within {connection.timeout_s:g} s")
    for leaf in _leaves(exc):
        if isinstance(leaf, McpFailure):
            return leaf
        if isinstance(leaf, MCPError):  # these two codes are the package's own: they tell addresses and pieces of pages
            is_own = leaf.code in (INVALID_REQUEST, PARSE_ERROR)
            message = "the server does not answer in JSON as MCP asks for" if is_own else leaf.message
            return McpFailure("mcp_protocol_error", leaf.code, message)
    return McpFailure("http_error", 502, "the server could not be reached, or does not speak MCP")


def _leaves(exc: BaseException) -> list[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        return [leaf for inner in exc.exceptions for leaf in _leaves(inner)]
    return [exc]


def _outcome(result: Any) -> Outcome:
    if result.is_error:
        content = [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in result.content]
        return Outcome(None, {"type": "mcp_tool_execution_error", "content": content})
    texts = [_text(block) for block in result.content]
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return Outcome("\n".join(texts))


def _text(block: Any) -> str:
    """A block as the model reads it; what is no text is named."""
    match block.type:
        case "text":
            return str(block.text)
        case "resource" if hasattr(block.resource, "text"):
            return str(block.resource.text)
        case "resource_link":
            return str(block.uri)
        case kind:
            return f"[{kind} left out: the model reads text only]"
