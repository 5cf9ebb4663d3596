"""Reads the MCP servers of a body of POST /v1/responses, and makes functions for the model of their tools.

Invariant: only addresses that the operator lists in `mcp_servers` are used. Everything else is refused by name.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from pydantic import TypeAdapter, ValidationError

from weft.server.apis.responses.answers import McpTool
from weft.server.apis.responses.input import InputItem
from weft.server.apis.responses.mcp_client import McpConnection, is_installed
from weft.server.apis.responses.schema import ApprovalFilter, ResponseItem, ResponseTool, ToolFilter
from weft.server.errors import InvalidRequestError, UnsupportedParameterError, UnsupportedValueError, shown
from weft.server.settings import HeaderName, HeaderValue, McpServer, Settings
from weft.server.task.schema import FunctionDefinition
from weft.server.task.tool_use import MAX_TOOLS, HostedTool
from weft.server.task.validation import required

MCP_MEMBERS = (
    *("server_label", "server_url", "server_description", "headers", "authorization"),
    *("allowed_tools", "require_approval"),
)
"""Members that only tools of type mcp have."""
_REFUSED = ("connector_id", "tunnel_id", "defer_loading", "allowed_callers")
_OF_OTHERS = ("name", "description", "parameters", "strict", "format")
_HEADERS: TypeAdapter[dict[str, str]] = TypeAdapter(dict[HeaderName, HeaderValue])
_OWN_HEADERS = re.compile(r"host|connection|te|trailer|upgrade|accept.*|content-.*|transfer-.*|mcp-.*|proxy-.*", re.I)
"""Headers that a client may not set: those of the protocols."""
MAX_SERVERS = 16
"""Most MCP servers of one body, which are all asked for their tools at once."""


@dataclass(frozen=True, slots=True)
class McpUse:
    """One server of a body: how to reach it, and which of its tools may be called, with or without approval."""

    connection: McpConnection
    allowed: ToolFilter | None
    approval: ApprovalFilter | str
    description: str | None  # of the server, in the words of the body

    @property
    def label(self) -> str:
        """The name that the body gives the server."""
        return self.connection.label

    def allows(self, tool: McpTool) -> bool:
        """Whether the model may be offered this tool."""
        return self.allowed is None or _matches(self.allowed, tool)

    def needs_approval(self, tool: McpTool) -> bool:
        """Whether the client must approve each call of this tool."""
        if isinstance(self.approval, str):
            return self.approval == "always"
        always, never = self.approval.always, self.approval.never
        return never is None or not _matches(never, tool) or (always is not None and _matches(always, tool))


@dataclass(frozen=True, slots=True)
class Listing:
    """The tools of one server that the model is offered; `error` says why there are none.

    `is_old` means that the input brings the list, so the response does not show it again; `left_out` has the paths of
    what the server lists that is no tool, or not as MCP asks for.
    """

    use: McpUse
    tools: Sequence[McpTool]
    error: str | None = None
    is_old: bool = False
    left_out: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class HostedFunction:
    """A tool of a server as a function for the model."""

    function: FunctionDefinition
    tool: HostedTool


@dataclass(frozen=True, slots=True)
class HostedTools:
    """What servers add to a body's own tools.

    Attributes:
        is_later: The model has called one of them before in this response, so none is required any more.
        may_call: Calls are left; if not, none of them is offered.
        left_out: Paths of what servers list and the model is not shown.
    """

    functions: Sequence[HostedFunction] = ()
    is_later: bool = False
    may_call: bool = True
    left_out: Sequence[str] = ()


NO_HOSTED = HostedTools()


def read_servers(tools: Sequence[ResponseTool] | None, settings: Settings) -> list[McpUse]:
    """The MCP servers of a body.

    Raises:
        InvalidRequestError: A member is wrong, or the operator does not list the server.
    """
    uses: list[McpUse] = []
    for i, tool in enumerate(tools or ()):
        if tool.type == "mcp":
            use = _use(tool, f"tools[{i}]", settings)
            if use.label in {other.label for other in uses}:
                at = f"tools[{i}].server_label"
                raise InvalidRequestError(f"{at} declares {shown(use.label)} a second time", param=at)
            uses.append(use)
            if len(uses) > MAX_SERVERS:
                message = f"tools must hold at most {MAX_SERVERS} tools of type mcp, got more"
                raise InvalidRequestError(message, param="tools")
    return uses


def _use(tool: ResponseTool, at: str, settings: Settings) -> McpUse:
    label = required(tool.server_label, f"{at}.server_label")
    server = _listed(tool, label, at, settings.mcp_servers)
    if not is_installed():
        message = f"{at}: this server cannot use MCP: the package is missing (pip install 'weft[mcp]')"
        raise UnsupportedParameterError(message, param=at)
    for name in _OF_OTHERS:
        if getattr(tool, name) is not None:
            raise InvalidRequestError(f"{at}.{name} is not a member of tools of type mcp", param=f"{at}.{name}")
    for name in _REFUSED:
        if value := (tool.model_extra or {}).get(name):
            message = f"{at}.{name} is not supported by this server, got {shown(value)}"
            raise UnsupportedParameterError(message, param=f"{at}.{name}")
    headers = {**server.headers, **_headers(tool, at, server.headers)}
    connection = McpConnection(label, server.url, headers, settings.mcp_timeout_s, settings.mcp_max_bytes)
    allowed = ToolFilter(tool_names=tool.allowed_tools) if isinstance(tool.allowed_tools, list) else tool.allowed_tools
    return McpUse(connection, allowed, tool.require_approval or "always", tool.server_description)


def _listed(tool: ResponseTool, label: str, at: str, servers: Mapping[str, McpServer]) -> McpServer:
    """The operator's server that the tool means: the one with its URL, or if it has none, with its label."""
    at = f"{at}.server_url"
    if tool.server_url is None and label in servers:
        return servers[label]
    for server in servers.values():
        if server.url == tool.server_url:
            return server
    known = ", ".join(servers) or "none"  # by label: a URL may hold a secret
    given = f"label {shown(label)}" if tool.server_url is None else shown(tool.server_url)
    raise UnsupportedValueError(
        f"{at} must be that of a server which the operator lists in the setting mcp_servers ({known}), got {given}",
        param=at,
    )


def _headers(tool: ResponseTool, at: str, of_operator: Mapping[str, str]) -> dict[str, str]:
    """The client's own headers. The messages do not quote values: they may be secrets."""
    given = {f"{at}.headers": tool.headers or {}}
    if tool.authorization is not None:
        given[f"{at}.authorization"] = {"Authorization": f"Bearer {tool.authorization}"}
    taken = {name.lower() for name in of_operator}
    result: dict[str, str] = {}
    for path, headers in given.items():
        try:
            result |= _HEADERS.validate_python(headers)
        except ValidationError:
            raise InvalidRequestError(
                f"{path} must have names of letters, digits and dashes, and values of visible ASCII, at most 8192",
                param=path,
            ) from None
        for name in headers:
            if name.lower() in taken or _OWN_HEADERS.fullmatch(name):
                raise InvalidRequestError(f"{path} may not set {shown(name)}: it is set by this server", param=path)
            taken.add(name.lower())
    return result


def listings_in(items: Sequence[InputItem], uses: Sequence[McpUse]) -> dict[str, Listing]:
    """The lists that the input brings, by label; those that failed are not taken.

    Raises:
        InvalidRequestError: A list is malformed.
    """
    by_label = {use.label: use for use in uses}
    found: dict[str, Listing] = {}
    for each in items:
        use = by_label.get(each.item.server_label or "")
        if each.item.type != "mcp_list_tools" or use is None or each.item.error is not None:
            continue
        try:
            tools = msgspec.convert(each.item.tools, list[McpTool])
        except msgspec.ValidationError as exc:
            at = f"{each.at}.tools"
            raise InvalidRequestError(f"{at} must be the tools of an MCP server: {exc}", param=at) from None
        if len(tools) > MAX_TOOLS:
            at = f"{each.at}.tools"
            raise InvalidRequestError(f"{at} must hold at most {MAX_TOOLS} tools, got {len(tools)}", param=at)
        found[use.label] = Listing(use, [tool for tool in tools if use.allows(tool)], is_old=True)
    return found


def hosted_functions(listings: Sequence[Listing], own_names: set[str]) -> list[HostedFunction]:
    """Functions for all listed tools. A name that is taken or unfit for the model is changed.

    Raises:
        InvalidRequestError: There are too many tools.
    """
    result: list[HostedFunction] = []
    taken = set(own_names)
    for listing in listings:
        for tool in listing.tools:
            if len(taken) >= MAX_TOOLS:
                raise InvalidRequestError(
                    f"tools must hold at most {MAX_TOOLS} tools with those of MCP servers, got more; name fewer in "
                    "allowed_tools",
                    param="tools",
                )
            name = _free_name(tool.name, listing.use.label, taken)
            taken.add(name)
            told = "\n".join(filter(None, (listing.use.description, tool.description)))
            function = FunctionDefinition(name=name, description=told or None, parameters=tool.input_schema)
            hosted = HostedTool(listing.use.label, tool.name, listing.use.needs_approval(tool))
            result.append(HostedFunction(function, hosted))
    return result


def _free_name(name: str, label: str, taken: set[str]) -> str:
    fit = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:64] or "_"
    names = itertools.chain([fit], (f"{label[:24]}_{fit[:32]}_{i}" for i in itertools.count(1)))
    return next(name for name in names if name not in taken)


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call that the client has approved and that has not been made yet."""

    request_id: str
    label: str
    name: str
    arguments: str


def approved_calls(items: Sequence[InputItem], uses: Sequence[McpUse]) -> list[ApprovedCall]:
    """The calls to make before the model goes on.

    Raises:
        InvalidRequestError: The server of an approved call is not among the tools.
    """
    requests: dict[str | None, ResponseItem] = {
        each.item.id: each.item for each in items if each.item.type == "mcp_approval_request" and each.item.id
    }
    made = {each.item.approval_request_id for each in items if each.item.type == "mcp_call"}
    labels = {use.label for use in uses}
    calls: dict[str, ApprovedCall] = {}
    decided: set[str | None] = set()
    for each in items:
        item, asked = each.item, requests.get(each.item.approval_request_id)
        if item.type != "mcp_approval_response" or asked is None or asked.id in made:
            continue
        if asked.id in decided:
            at = f"{each.at}.approval_request_id"
            raise InvalidRequestError(f"{at} is decided a second time, got {shown(asked.id)}", param=at)
        decided.add(asked.id)
        if not item.approve:
            continue
        if asked.server_label not in labels:
            at = f"{each.at}.approval_request_id"
            message = f"{at} approves a call of the MCP server {shown(asked.server_label)}, which tools must hold"
            raise InvalidRequestError(message, param=at)
        assert asked.id is not None, "it answers an id"
        name = required(asked.name, "name of an mcp_approval_request")
        calls[asked.id] = ApprovedCall(asked.id, asked.server_label or "", name, asked.arguments or "")
    return list(calls.values())


def _matches(wanted: ToolFilter, tool: McpTool) -> bool:
    if wanted.tool_names is not None and tool.name not in wanted.tool_names:
        return False
    is_read_only = bool((tool.annotations or {}).get("readOnlyHint"))
    return wanted.read_only is None or wanted.read_only == is_read_only
