"""Wire types of the answers of /v1/responses and /v1/conversations: the output's items, the response and its usage."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from weft.server.task.bodies import TokenLogprob
from weft.server.task.schema import CachedTokens


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[None] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str = ""


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """The text of the answer."""

    id: str
    status: str = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The reasoning before the answer. Weft shows the reasoning itself, so there is no summary."""

    id: str
    status: str = "in_progress"
    summary: list[None] = []
    content: list[ReasoningText] = []
    encrypted_content: str | UnsetType = UNSET


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call of a function; `arguments` is JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"
    namespace: str | UnsetType = UNSET


class CustomCallItem(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    call_id: str
    name: str
    input: str = ""
    status: str = "in_progress"
    namespace: str | UnsetType = UNSET


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


OutputItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomCallItem
    | McpListToolsItem
    | McpCallItem
    | McpApprovalRequestItem
)


class OutputDetails(msgspec.Struct):
    """Output tokens that were spent on reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why the answer ended early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


FailureCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


class ResponseFailure(msgspec.Struct):
    """Why there is no answer."""

    code: FailureCode
    message: str
    type: str
    param: str | None


class ResponseObject(msgspec.Struct, kw_only=True):
    """The response. What the body chose stands in it; status, output and usage change while it is made."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str = "in_progress"
    background: bool = False
    completed_at: int | None = None
    conversation: dict[str, str] | None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


class CompactionItem(msgspec.Struct, tag_field="type", tag="compaction"):
    """A sealed summary of what was said before."""

    id: str
    encrypted_content: str


class CompactedResponse(msgspec.Struct):
    """A conversation in few items: messages of the user, and a summary."""

    id: str
    created_at: int
    output: list[Any]
    usage: ResponseUsage
    object: Literal["response.compaction"] = "response.compaction"


class ConversationObject(msgspec.Struct):
    """A conversation, without its items."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"
