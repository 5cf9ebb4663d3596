"""Wire types of MCP tools in POST /v1/responses: how a body chooses them, and the items about them."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Discriminator, Tag

from weft.server.schemas.common import Items, Text, WireModel


class ToolFilter(WireModel):
    """Some tools of a server. A tool matches if it has one of the names, and is read-only or not as wanted."""

    tool_names: Items[Text] | None = None
    read_only: bool | None = None


AllowedTools = Annotated[
    Annotated[Items[Text], Tag("names")] | Annotated[ToolFilter, Tag("filter")],
    Discriminator(lambda value: "names" if isinstance(value, list) else "filter"),
]


class ApprovalFilter(WireModel):
    """Tools that always need an approval, and tools that never do."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


RequireApproval = Annotated[
    Annotated[Literal["always", "never"], Tag("word")] | Annotated[ApprovalFilter, Tag("filter")],
    Discriminator(lambda value: "word" if isinstance(value, str) else "filter"),
]


class McpTool(msgspec.Struct):
    """A tool as its server describes it."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    annotations: dict[str, Any] | None = None


class McpListToolsItem(msgspec.Struct, tag_field="type", tag="mcp_list_tools"):
    """The tools of a server that the model is offered, or why there are none."""

    id: str
    server_label: str
    tools: list[McpTool] = []
    error: str | None = None


class McpCallItem(msgspec.Struct, tag_field="type", tag="mcp_call"):
    """A call that Weft makes; `arguments` is JSON text. It ends with `output` or with `error`."""

    id: str
    server_label: str
    name: str
    arguments: str = ""
    status: str = "in_progress"
    approval_request_id: str | None = None
    output: str | None = None
    error: dict[str, Any] | None = None


class McpApprovalRequestItem(msgspec.Struct, tag_field="type", tag="mcp_approval_request"):
    """A call that waits for the client's approval."""

    id: str
    server_label: str
    name: str
    arguments: str = ""
