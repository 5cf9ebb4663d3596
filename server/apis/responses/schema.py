"""Wire types of /v1/responses and /v1/conversations: bodies with their items and tools; `answers.py` has the answers.

Items of the input are one wide model: `weft.server.apis.responses.input` decides which types and members are accepted.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, ModelWrapValidatorHandler, Tag, model_validator

from weft.server.task import schema
from weft.server.task.bodies import ContentPart, Metadata
from weft.server.task.schema import TEXT_OR_OTHER, Int, Items, Text, WireModel
from weft.server.text.declared import tool_form
from weft.server.text.replayed import CallId, JsonText, read_choice, read_parts, read_result

MAX_INPUT_ITEMS = 2**14
MAX_NEW_ITEMS = 20
"""Most items that one call adds to a conversation."""


class ResponsePart(ContentPart):
    """One part of a content, of a tool's output, or of reasoning."""

    annotations: Items[Any] | None = None
    logprobs: Items[Any] | None = None


Content = Annotated[Annotated[Text, Tag("text")] | Annotated[Items[ResponsePart], Tag("other")], TEXT_OR_OTHER]


KNOWN_ITEMS = frozenset(
    {
        *("message", "reasoning", "compaction", "item_reference"),
        *("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
        *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    }
)
"""Types of items whose members are read. Items of any other type become text."""


class ResponseItem(WireModel):
    """One item of the input: a message, a call, the output of a call, reasoning, or a reference to a stored item.

    An item of another type is an `OtherItem`, whose members may be anything.
    """

    type: Text | None = None
    id: CallId | None = None
    role: Text | None = None
    content: Content | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    status: Literal["in_progress", "completed", "incomplete", "calling", "failed"] | None = None
    call_id: CallId | None = None
    name: Text | None = None
    namespace: Text | None = None
    arguments: JsonText | None = None
    input: JsonText | None = None
    output: Content | None = None
    summary: Items[ResponsePart] | None = None
    encrypted_content: Text | None = None
    server_label: Text | None = None
    tools: Items[Any] | None = None
    error: Any = None
    approval_request_id: Text | None = None
    approve: bool | None = None
    reason: Text | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_type(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> "ResponseItem":
        kind = value.get("type") if cls is ResponseItem and isinstance(value, dict) else None
        if not isinstance(kind, str) or kind in KNOWN_ITEMS:
            return handler(_read(value) if isinstance(value, dict) else value)
        ids = {name: value[name] for name in ("id", "call_id") if isinstance(value.get(name), str)}
        return OtherItem(type=kind, **ids, members=value)

    @property
    def is_call(self) -> bool:
        """Whether the item is a call, such as local_shell_call."""
        return (self.type or "").endswith("_call")

    @property
    def is_output(self) -> bool:
        """Whether the item is the output of a call, such as local_shell_call_output."""
        return (self.type or "").endswith("_output")

    @property
    def shared_id(self) -> str:
        """The id that a call and its output share; an empty text if there is none."""
        return self.call_id or self.id or ""


def _read(item: dict[str, Any]) -> dict[str, Any]:
    """A known item whose content may have other forms."""
    match item.get("type"):
        case "function_call_output" | "custom_tool_call_output":
            return {**item, "output": read_result(item.get("output"))}
        case "reasoning":
            own = {name: [value] for name in ("content", "summary") if isinstance(value := item.get(name), dict)}
            if isinstance(summary := item.get("summary"), str):
                own["summary"] = [{"type": "summary_text", "text": summary}]
            return {
                **item,
                **{name: read_parts(own.get(name, item[name])) for name in ("content", "summary") if name in item},
            }
        case "message" | None if "role" in item and "content" in item:
            return {**item, "content": "" if item.get("content") is None else read_parts(item["content"])}
    return item


class OtherItem(ResponseItem):
    """An item of another type, such as a call of a tool that another server hosts, with all its members."""

    type: Text
    members: dict[str, Any]

    def called(self) -> tuple[str, Any]:
        """The name and the arguments of a call."""
        members = schema.shown_members(self.members)
        arguments = members.get("arguments")
        return self.type.removesuffix("_call"), arguments if isinstance(arguments, dict) else members

    def output_text(self) -> str:
        """The output of a call as text."""
        members = schema.shown_members(self.members)
        output = members.get("output")
        return output if isinstance(output, str) else schema.json_text(members if output is None else output)


Input = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[ResponseItem], Field(fail_fast=True, max_length=MAX_INPUT_ITEMS), Tag("other")],
    TEXT_OR_OTHER,
]


class ConversationReference(WireModel):
    """A stored conversation."""

    id: Text


Conversation = Annotated[Annotated[Text, Tag("text")] | Annotated[ConversationReference, Tag("other")], TEXT_OR_OTHER]


class ToolFormat(WireModel):
    """The format of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Text | None = None
    definition: Text | None = None


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


KNOWN_TOOLS = ("function", "custom", "mcp", "namespace")


class ResponseTool(WireModel):
    """One entry of `tools`: a function, a custom tool, a namespace of these, or an MCP server.

    The members of an MCP server begin with `server_label`. A tool of another type is an `OtherTool`.
    """

    type: Text
    name: schema.ToolName | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormat | None = None
    tools: "Items[ResponseTool] | None" = None
    server_label: Annotated[Text, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    server_url: Text | None = None
    server_description: Text | None = None
    headers: Annotated[dict[str, Text], Field(max_length=16)] | None = None
    authorization: Text | None = None
    allowed_tools: AllowedTools | None = None
    require_approval: RequireApproval | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_type(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> "ResponseTool":
        if cls is not ResponseTool or not isinstance(value, dict) or value.get("type") in ("mcp", "namespace"):
            return handler(value)
        form = tool_form(value)
        return handler(form.flat) if form.is_called else OtherTool(type=form.kind)


class OtherTool(ResponseTool):
    """A tool that this server does not host, such as web_search. Its members are of no use."""


class FlatReference(WireModel):
    """A reference to a tool by kind and name, or to all tools of an MCP server."""

    type: Text
    name: Text | None = None
    namespace: Text | None = None
    server_label: Text | None = None


class ResponseToolChoice(FlatReference):
    """One tool that must be called, or the tools that may be called."""

    mode: Literal["auto", "required"] | None = None
    tools: Items[FlatReference] | None = None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")] | Annotated[ResponseToolChoice, Tag("other")],
    TEXT_OR_OTHER,
    BeforeValidator(read_choice),
]


class TextFormat(schema.AnswerFormat):
    """The format of the answer. Only json_schema has the other members."""

    is_nested = False
    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(WireModel):
    """How the text of the answer must be."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(WireModel):
    """How the model reasons. `context`: whether reasoning of earlier turns is shown to the model again."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    mode: Text | None = None


class ResponseCacheOptions(schema.PromptCacheOptions):
    """How the response uses the prefix cache. `prewarm` computes the prompt and generates nothing."""

    prewarm: bool | None = None


Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class ResponseBody(schema.GenerationBody):
    """The body of POST /v1/responses and of POST /v1/responses/input_tokens."""

    spoken = frozenset({"input", "instructions"})

    input: Input | None = None
    instructions: Text | None = None
    previous_response_id: Text | None = None
    conversation: Conversation | None = None
    max_output_tokens: Int | None = None
    max_tool_calls: Int | None = None
    include: Annotated[list[Includable], Field(max_length=16)] | None = None
    top_logprobs: Int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Items[ResponseTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt_cache_options: ResponseCacheOptions | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    generate: bool | None = None

    # accepted, not honoured
    safety_identifier: Text | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None


class CompactBody(WireModel):
    """The body of POST /v1/responses/compact."""

    spoken = frozenset({"input", "instructions"})

    model: Text | None = None
    input: Input | None = None
    instructions: Text | None = None
    previous_response_id: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_options: ResponseCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: schema.ServiceTier | None = None


NewItems = Annotated[list[ResponseItem], Field(fail_fast=True, max_length=MAX_NEW_ITEMS)]


class ConversationBody(WireModel):
    """The body of POST /v1/conversations."""

    spoken = frozenset({"items"})

    items: NewItems | None = None
    metadata: Metadata | None = None


class ConversationUpdate(WireModel):
    """The body of POST /v1/conversations/{id}."""

    metadata: Metadata | None


class ItemsBody(WireModel):
    """The body of POST /v1/conversations/{id}/items."""

    spoken = frozenset({"items"})

    items: NewItems
