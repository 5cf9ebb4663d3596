"""Converts Anthropic's bodies to chat bodies, and `cache_control` to breakpoints.

The system prompt becomes the first message. A turn's tool results become messages of their own, in place. Tools that
this server does not host are left out and reported; what such tools wrote elsewhere becomes text. Errors that the chat
body causes name the fields of the body that was sent (`RENAMED`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft.server.apis.anthropic import schema as wire
from weft.server.errors import InvalidRequestError, ThreadsUnsupportedError, UnsupportedValueError, shown
from weft.server.task.bodies import ChatCompletionBody, FunctionCall, Message, ToolCall
from weft.server.task.messages import PART_SEPARATOR
from weft.server.task.parts import PARTS, Spans, part_text
from weft.server.task.request_options import MAX_BREAKPOINTS, Breakpoint
from weft.server.task.schema import FunctionDefinition, ResponseFormat, ToolDefinition, foreign_text
from weft.server.task.validation import Refused, check_range, required

RENAMED: Mapping[str, str] = {
    r"^stop(?=$|\[)": "stop_sequences",
    r"\.function\.parameters": ".input_schema",
    r"^tool_choice\.function": "tool_choice",
    r"^(thinking_token_budget|reasoning_budget_tokens)": "thinking.budget_tokens",
    r"^reasoning_effort": "output_config.effort",
    r"^response_format\.json_schema": "output_config.format",
}
"""Beginnings of paths in the chat body, and what the caller calls them."""

REFUSED_IN_MESSAGES: Refused = {"mcp_servers": (None, []), "container": (None,), "thread": (None,)}

_TTLS_S = {None: 300.0, "5m": 300.0, "1h": 3600.0}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TIERS: Mapping[str | None, Any] = {None: None, "auto": "auto", "standard_only": "default"}
_ERROR_PREFIX = "Error: "
_EFFORTS = frozenset({"low", "medium", "high", "xhigh", "max"})
_BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*(?:\n|$)", re.I)
"""The line with which Claude Code begins its system prompt. It says nothing to the model and differs at every turn, so
the prefix cache would find nothing behind it."""


class Conversation(NamedTuple):
    """A body as the chat pipeline takes it."""

    chat: ChatCompletionBody
    breakpoints: list[Breakpoint]
    left_out: list[str]
    spans: Spans


@dataclass(slots=True)
class _Turns:
    """The messages so far, and the one that is being written."""

    messages: list[Message] = field(default_factory=list)
    breakpoints: list[Breakpoint] = field(default_factory=list)
    spans: Spans = field(default_factory=lambda: Spans("blocks"))
    call_ids: set[str] = field(default_factory=set)

    def mark(self, control: wire.CacheControl | None, num_chars: int) -> None:
        """Set a breakpoint in the next message that is added."""
        if control is not None:
            self.breakpoints.append(Breakpoint(len(self.messages), num_chars, _TTLS_S[control.ttl]))

    def has_mark(self) -> bool:
        """Whether the next message has a breakpoint."""
        return bool(self.breakpoints) and self.breakpoints[-1].message == len(self.messages)

    def add_text(self, role: Any, content: str | Sequence[wire.Block], at: str) -> None:
        """Add one message of text blocks."""
        self.messages.append(Message(role=role, content=self.text(content, at)))

    def text(self, content: str | Sequence[wire.Block], at: str) -> str:
        """The text of a content, whose breakpoints belong to the next message."""
        if isinstance(content, str):
            return content
        text = ""
        for i, block in enumerate(content):
            text += (PART_SEPARATOR if i else "") + _block_text(block, f"{at}[{i}]", self.spans)
            self.mark(block.cache_control, len(text))
        return text


def count_conversation(body: wire.CountTokensBody, *, strict: bool) -> Conversation:
    """The conversation of a body that is only counted."""
    turns, left_out = _turns(body), _left_out(body, strict=strict)
    turns.spans.beyond = "read"
    return Conversation(ChatCompletionBody(**_shared_fields(body, turns)), [], left_out, turns.spans)


def conversation(body: wire.MessagesBody, *, strict: bool) -> Conversation:
    """The conversation that a body asks to continue. If `strict`, what would be left out is refused.

    Raises:
        InvalidRequestError: A block, a tool or a value does not fit its place.
        UnsupportedValueError: A block or a tool of this type is not supported.
    """
    if (body.model_extra or {}).get("thread") is not None:  # it may stand for the tools and most of the messages
        raise ThreadsUnsupportedError("thread is not supported: send the whole conversation", param="thread")
    check_range("max_tokens", body.max_tokens, 1, None)
    if body.temperature is not None and not 0 <= body.temperature <= 1:
        message = f"temperature must be between 0 and 1, got {shown(body.temperature)}"
        raise InvalidRequestError(message, param="temperature")
    if body.top_k is not None:
        check_range("top_k", body.top_k, 0, None)
    turns, left_out = _turns(body), _left_out(body, strict=strict)
    chat = ChatCompletionBody(
        **_shared_fields(body, turns),
        max_tokens=body.max_tokens,
        stream=body.stream,
        stop=body.stop_sequences or None,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        service_tier=_TIERS[body.service_tier],
        safety_identifier=body.metadata.user_id if body.metadata else None,
    )
    breakpoints = sorted(turns.breakpoints, key=lambda each: (each.message, each.num_chars))
    return Conversation(chat, breakpoints, left_out, turns.spans)


def _left_out(body: wire.CountTokensBody, *, strict: bool) -> list[str]:
    """The paths of what has no use here, with the values, which a later version of the API may know."""
    tools = enumerate(body.tools or ())
    found = [(f"tools[{i}].type", tool.type) for i, tool in tools if isinstance(tool, wire.ServerTool)]
    if body.thinking is not None:
        if body.thinking.type not in ("enabled", "disabled", "adaptive"):
            found.append(("thinking.type", body.thinking.type))
        if body.thinking.display not in (None, "summarized", "omitted"):
            found.append(("thinking.display", body.thinking.display))
    effort = body.output_config.effort if body.output_config else None
    if effort is not None and effort not in _EFFORTS:
        found.append(("output_config.effort", effort))
    if found and strict:
        path, value = found[0]
        hosts = ": this server runs no tools" if path.startswith("tools") else ""
        raise UnsupportedValueError(f"{path} cannot be {shown(value)}{hosts}", param=path)
    return [f"{path}={value}" for path, value in found]


def _without_billing(system: str | Sequence[wire.Block]) -> str | Sequence[wire.Block]:
    """The system prompt without the line for billing; a block of that line alone is dropped."""
    if isinstance(system, str):
        return _BILLING.sub("", system, count=1) if _BILLING.match(system) else system
    kept = []
    for block in system:
        if block.text is not None and _BILLING.match(block.text):
            text = _BILLING.sub("", block.text, count=1)
            kept += [block.model_copy(update={"text": text})] if text else []
        else:
            kept.append(block)
    return kept


def _turns(body: wire.CountTokensBody) -> _Turns:
    turns = _Turns()
    if system := _without_billing(body.system or ""):
        turns.add_text("system", system, "system")
    marked_tools = [tool.cache_control for tool in body.tools or () if tool.cache_control is not None]
    if marked_tools:  # a template shows tools somewhere before the first turn
        turns.mark(marked_tools[-1], 0)
    for i, turn in enumerate(body.messages):
        _add_turn(turns, turn, f"messages[{i}].content")
    if body.cache_control is not None:
        last = len(turns.messages) - 1
        num_chars = len(str(turns.messages[last].content or ""))
        turns.breakpoints.append(Breakpoint(last, num_chars, _TTLS_S[body.cache_control.ttl]))
    num = len(turns.breakpoints) + len(marked_tools[1:])
    check_range("the number of blocks with cache_control", num, 0, MAX_BREAKPOINTS, param="cache_control")
    return turns


def _add_turn(turns: _Turns, turn: wire.Turn, at: str) -> None:
    if turn.role == "assistant":
        _add_assistant_turn(turns, turn.content if isinstance(turn.content, list) else [], turn.content, at)
    elif turn.content is None or isinstance(turn.content, str):
        turns.add_text(turn.role, turn.content or "", at)
    else:
        texts: list[wire.Block] = []
        for i, block in enumerate(turn.content):
            if block.type == "tool_result" and turn.role == "user":
                _add_user_text(turns, turn, texts, at)
                texts = []
                _add_result(turns, block, f"{at}[{i}]")
            elif block.type in PARTS or isinstance(block, wire.OtherBlock):
                texts.append(block)
            else:
                raise _unsupported(block, f"{at}[{i}]")
        _add_user_text(turns, turn, texts, at)


def _add_user_text(turns: _Turns, turn: wire.Turn, texts: Sequence[wire.Block], at: str) -> None:
    if texts or not turn.content:
        turns.add_text(turn.role, texts, at)


def _add_result(turns: _Turns, block: wire.Block, at: str) -> None:
    text = (_ERROR_PREFIX if block.is_error else "") + turns.text(block.content or "", f"{at}.content")
    turns.mark(block.cache_control, len(text))
    tool_use_id = required(block.tool_use_id, f"{at}.tool_use_id")
    if tool_use_id not in turns.call_ids:
        message = f"{at}.tool_use_id must be the id of an earlier tool_use, got {shown(tool_use_id)}"
        raise InvalidRequestError(message, param=f"{at}.tool_use_id")
    turns.messages.append(Message(role="tool", content=text, tool_call_id=tool_use_id))


def _add_assistant_turn(turns: _Turns, blocks: Sequence[wire.Block], content: object, at: str) -> None:
    texts, thoughts, calls = [content] if isinstance(content, str) else [], [], []
    num_chars = 0  # of the texts and what joins them
    for i, block in enumerate(blocks):
        path = f"{at}[{i}]"
        match block.type:
            case _ if block.type in PARTS or isinstance(block, wire.OtherBlock):
                num_chars += len(PART_SEPARATOR) if texts else 0
                texts.append(_block_text(block, path, turns.spans))
                num_chars += len(texts[-1])
            case "thinking":
                thoughts += [block.thinking] if block.thinking else []
            case "redacted_thinking":  # another server's secret; its data is reported as ignored
                pass
            case "tool_use":
                calls.append(_call(block, path))
                turns.call_ids.add(required(block.id, f"{path}.id"))
            case _:
                raise _unsupported(block, path)
        turns.mark(block.cache_control, num_chars)
    text = PART_SEPARATOR.join(texts)
    turns.messages.append(
        Message(
            role="assistant",
            content=text if text or turns.has_mark() or not calls else None,
            reasoning_content=PART_SEPARATOR.join(thoughts) if thoughts else None,
            tool_calls=calls or None,
        )
    )


def _call(block: wire.Block, at: str) -> ToolCall:
    function = FunctionCall(name=required(block.name, f"{at}.name"), arguments=block.input)
    return ToolCall(id=required(block.id, f"{at}.id"), type="function", function=function)


def _block_text(block: wire.Block, at: str, spans: Spans) -> str:
    if isinstance(block, wire.OtherBlock):
        return foreign_text(block.type, block.members)
    text = part_text(block, at, spans)
    if text is None:
        raise _unsupported(block, at)
    return text


def _unsupported(block: wire.Block, at: str) -> InvalidRequestError:
    if block.type in ("text", "thinking", "redacted_thinking", "tool_use", "tool_result"):
        message = f"{at}.type: a block of type {block.type!r} cannot stand here"
        return InvalidRequestError(message, param=f"{at}.type")
    return UnsupportedValueError(f"{at}: the model does not take blocks of type {shown(block.type)}", param=at)


def _shared_fields(body: wire.CountTokensBody, turns: _Turns) -> dict[str, Any]:
    """The members of a chat body that both endpoints fill."""
    last = turns.messages[-1]
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": turns.messages,
        "continue_final_message": True if last.role == "assistant" and last.content and not last.tool_calls else None,
        "tools": list(_tools(body.tools or [])) or None,
        **_thinking(body),
    }
    choice = body.tool_choice
    if choice is not None and fields["tools"]:
        fields["tool_choice"] = _CHOICES.get(choice.type)
        if choice.type == "tool":
            name = required(choice.name, "tool_choice.name")
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    elif choice is not None and choice.type in ("any", "tool"):
        raise InvalidRequestError("tool_choice needs tools, got none", param="tool_choice")
    format = (body.output_config and body.output_config.format) or body.output_format
    if format is not None:
        wanted = {"type": "json_schema", "json_schema": {"schema": format.schema_}}
        fields["response_format"] = ResponseFormat.model_validate(wanted)
    return fields


def _thinking(body: wire.CountTokensBody) -> dict[str, Any]:
    effort = body.output_config.effort if body.output_config and body.output_config.effort in _EFFORTS else None
    thinking = body.thinking
    if thinking is None:
        return {"reasoning_effort": effort}
    if thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    fields: dict[str, Any] = {"reasoning_effort": effort, "include_reasoning": thinking.display != "omitted"}
    if thinking.type == "enabled":
        budget = required(thinking.budget_tokens, "thinking.budget_tokens")
        fields["thinking_token_budget"] = check_range("thinking.budget_tokens", budget, 1, None)
        fields["reasoning_effort"] = effort or "medium"
    return fields


def _tools(tools: Sequence[wire.ClientTool]) -> Iterator[ToolDefinition]:
    for tool in tools:
        if isinstance(tool, wire.ServerTool):
            continue
        function = FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        yield ToolDefinition(type="function", function=function)
