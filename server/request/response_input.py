"""Turns the input items of POST /v1/responses into messages for the chat template.

Reasoning, a message of the assistant and calls that follow each other are one turn, so they become one message. An item
that this server has no use for is refused by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weft.server.errors import InvalidRequestError, UnsupportedValueError, shown
from weft.server.formats.parser import ToolFormat
from weft.server.request.cache_options import MAX_BREAKPOINTS, Breakpoint, breakpoint_at, usual_ttl_s
from weft.server.request.call_ids import fit_call_ids
from weft.server.request.messages import PART_SEPARATOR, call_of, function_call
from weft.server.request.validation import required
from weft.server.schemas.chat_completions import FunctionCall
from weft.server.schemas.common import PromptCacheOptions
from weft.server.schemas.responses import ResponseItem, ResponsePart
from weft.server.store.responses import FIRST_INPUT, item_id
from weft.server.task.tool_use import CUSTOM_INPUT

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}
_WITHOUT_STATUS = frozenset({"mcp_list_tools", "mcp_approval_request", "mcp_approval_response"})
SUMMARY_INTRO = "Summary of the conversation so far:\n"
"""What stands before the text of a compaction in the prompt."""
_ROLES = frozenset({"user", "system", "developer", "assistant"})
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"})


@dataclass(frozen=True, slots=True)
class InputItem:
    """One item, and its path in the body; items of earlier responses have a path that says so."""

    item: ResponseItem
    at: str


@dataclass(slots=True)
class Messages:
    """Messages for the chat template, while they are made from items; only `add` mutates it.

    Reasoning is a list of texts until all items are there.
    """

    usual_ttl_s: float
    unseal: Callable[[str, str], str | None]
    reasoning_from: int  # reasoning of items before this one is left out
    messages: list[dict[str, Any]] = field(default_factory=list)
    breakpoints: list[Breakpoint] = field(default_factory=list)
    turn: dict[str, Any] | None = None  # the open message of the assistant
    call_ids: set[str] = field(default_factory=set)

    def add(self, index: int, item: ResponseItem, at: str) -> None:
        """Add the next item.

        Raises:
            InvalidRequestError: The item is incomplete, or answers a call that is not in the input.
            UnsupportedValueError: This server has no use for such an item, or for a part of it.
        """
        match item.type or ("message" if item.role is not None else None):
            case "message":
                self._message(item, at)
            case "reasoning":
                if index >= self.reasoning_from and (text := self._reasoning(item, at)):
                    self._turn(("content", "tool_calls")).setdefault("reasoning_content", []).append(text)
            case "compaction":
                self.turn = None
                text = self._unsealed("compaction", _member(item, "encrypted_content", at), at)
                self.messages.append({"role": "assistant", "content": SUMMARY_INTRO + text})
            case "function_call":
                function = FunctionCall(name=_member(item, "name", at), arguments=_member(item, "arguments", at))
                self._call(_member(item, "call_id", at), function_call(function))
            case "custom_tool_call":
                call = call_of(_member(item, "name", at), {CUSTOM_INPUT: _member(item, "input", at)})
                self._call(_member(item, "call_id", at), call)
            case "function_call_output" | "custom_tool_call_output":
                self._output(item, at)
            case "mcp_list_tools":
                pass  # the tools are in the template's own place for them
            case "mcp_call" | "mcp_approval_request" | "mcp_approval_response":
                self._hosted(item, at)
            case other:
                raise UnsupportedValueError(
                    f"{at}: items of type {shown(other)} are not supported by this server", param=f"{at}.type"
                )

    def _message(self, item: ResponseItem, at: str) -> None:
        role = _member(item, "role", at)
        if role not in _ROLES:
            bound = ", ".join(sorted(_ROLES))
            raise InvalidRequestError(f"{at}.role must be one of {bound}, got {shown(role)}", param=f"{at}.role")
        if role == "assistant":
            self._turn(("content", "tool_calls"))["content"] = _text(item.content, f"{at}.content")
            return
        self.turn = None
        self._find_breakpoints(item.content, f"{at}.content")
        self.messages.append({"role": role, "content": _text(item.content, f"{at}.content")})

    def _call(self, call_id: str, call: dict[str, Any]) -> None:
        self.call_ids.add(call_id)
        self._turn(()).setdefault("tool_calls", []).append({"id": call_id, **call})

    def _output(self, item: ResponseItem, at: str) -> None:
        call_id = _member(item, "call_id", at)
        if call_id not in self.call_ids:
            raise InvalidRequestError(
                f"{at}.call_id must be that of an earlier call in the input, got {shown(call_id)}",
                param=f"{at}.call_id",
            )
        self._answer_call(call_id, _text(item.output, f"{at}.output"))

    def _answer_call(self, call_id: str, content: str) -> None:
        self.turn = None
        self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})

    def _hosted(self, item: ResponseItem, at: str) -> None:
        """A call of an MCP tool, with its output, or a request for one and the refusal of it."""
        asked = item.approval_request_id
        if item.type == "mcp_approval_response" and asked not in self.call_ids:
            raise InvalidRequestError(
                f"{at}.approval_request_id must be that of an earlier mcp_approval_request, got {shown(asked)}",
                param=f"{at}.approval_request_id",
            )
        if item.type == "mcp_approval_response":
            if not required(item.approve, f"{at}.approve"):
                self._answer_call(asked or "", f"The user did not approve this call. {item.reason or ''}".strip())
            return
        call_id = asked if asked in self.call_ids else _member(item, "id", at)
        assert call_id is not None, "the ids of calls are texts"
        if call_id != asked:
            function = FunctionCall(name=_member(item, "name", at), arguments=_member(item, "arguments", at))
            self._call(call_id, function_call(function))
        if item.type == "mcp_call":
            error = msgspec.json.encode(item.error).decode() if item.error is not None else "none"
            output = f"The call failed: {error}" if item.output is None else _text(item.output, f"{at}.output")
            self._answer_call(call_id, output)

    def _reasoning(self, item: ResponseItem, at: str) -> str:
        """The text of the reasoning itself, plain or encrypted, else of its summary."""
        if item.content:
            return _text(item.content, f"{at}.content", "")
        if item.encrypted_content is None:
            return _text(item.summary or "", f"{at}.summary")
        return self._unsealed("reasoning", item.encrypted_content, at)

    def _unsealed(self, kind: str, sealed: str, at: str) -> str:
        text = self.unseal(kind, sealed)
        if text is None:
            path = f"{at}.encrypted_content"
            message = f"{path} was not made by this server as {kind} for this API key, or was changed"
            raise InvalidRequestError(message, param=path)
        return text

    def _turn(self, absent: Sequence[str]) -> dict[str, Any]:
        """The open message of the assistant; a new one if there is none, or if it has one of these members."""
        if self.turn is None or any(self.turn.get(name) is not None for name in absent):
            self.turn = {"role": "assistant", "content": None}
            self.messages.append(self.turn)
        return self.turn

    def _find_breakpoints(self, content: str | list[ResponsePart] | None, at: str) -> None:
        num_chars = 0
        for j, part in enumerate(content if isinstance(content, list) else ()):
            num_chars += len(part.text or part.refusal or "")
            if part.prompt_cache_breakpoint is not None:
                given, here = part.prompt_cache_breakpoint, len(self.messages)
                self.breakpoints.append(breakpoint_at(here, num_chars, given, self.usual_ttl_s, f"{at}[{j}]"))
            num_chars += len(PART_SEPARATOR)


def input_messages(
    items: Sequence[InputItem],
    instructions: str | None,
    tools: ToolFormat | None,
    cache: PromptCacheOptions | None,
    *,
    shows_old_reasoning: bool,
    unseal: Callable[[str, str], str | None],
) -> tuple[list[dict[str, Any]], list[Breakpoint]]:
    """The messages for the template, and the last breakpoints in them.

    Args:
        tools: How the model writes calls; None: it has no tools.
        unseal: Decrypts a text of a kind; None is returned for what was not encrypted as such for this caller.
        shows_old_reasoning: Reasoning before the last message of the user is kept; the template may still drop it.

    Raises:
        InvalidRequestError: There is no item, or one is wrong.
    """
    if not items and instructions is None:
        raise InvalidRequestError("input must hold at least one item, got none", param="input")
    of_user = [i for i, each in enumerate(items) if each.item.role == "user"]
    made = Messages(usual_ttl_s(cache), unseal, of_user[-1] if of_user and not shows_old_reasoning else 0)
    if instructions is not None:
        made.messages.append({"role": "system", "content": instructions})
    try:
        for i, each in enumerate(items):
            made.add(i, each.item, each.at)
    except RecursionError as exc:  # arguments are JSON inside JSON; the body's parser did not check their depth
        raise InvalidRequestError("input is nested too deeply", param="input") from exc
    for message in made.messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""  # the turn was cut during its reasoning
    fit_call_ids(made.messages, tools)
    return made.messages, made.breakpoints[-MAX_BREAKPOINTS:]


def check_items(items: Sequence[InputItem], unseal: Callable[[str, str], str | None]) -> None:
    """Check items that may follow any others, such as outputs of calls that come before them.

    Raises:
        InvalidRequestError: One is wrong.
    """
    call_ids = {id for each in items for id in (each.item.call_id, each.item.approval_request_id) if id is not None}
    made = Messages(usual_ttl_s(None), unseal, 0, call_ids=call_ids)
    try:
        for each in items:
            made.add(0, each.item, each.at)
    except RecursionError as exc:
        raise InvalidRequestError("items are nested too deeply", param="items") from exc


def items_to_store(items: Sequence[InputItem], response_id: str) -> list[dict[str, Any]]:
    """The items in their full form: each with an id and a status, contents as lists of parts."""
    return [_full(each.item, response_id, i) for i, each in enumerate(items)]


def _full(item: ResponseItem, response_id: str, index: int) -> dict[str, Any]:
    given = item.model_dump(exclude_none=True)
    kind = given.setdefault("type", "message")
    given.setdefault("id", item_id(_PREFIXES.get(kind, "item"), response_id, FIRST_INPUT + index))
    if kind not in _WITHOUT_STATUS:
        given.setdefault("status", "completed")
    if kind == "message":
        is_output = item.role == "assistant"
        if isinstance(item.content, str):
            given["content"] = [{"type": "output_text" if is_output else "input_text", "text": item.content}]
        for part in given["content"] if is_output else ():
            if part["type"] == "output_text":
                part.setdefault("annotations", [])
    if kind == "reasoning":
        given.setdefault("summary", [])
        if isinstance(item.content, str):
            given["content"] = [{"type": "reasoning_text", "text": item.content}]
    return given


def _member(item: ResponseItem, name: str, at: str) -> str:
    value: str = required(getattr(item, name), f"{at}.{name}")
    return value


def _text(content: str | list[ResponsePart] | None, at: str, separator: str = PART_SEPARATOR) -> str:
    if content is None:
        raise InvalidRequestError(f"{at} is required", param=at)
    if isinstance(content, str):
        return content
    return separator.join(_part_text(part, f"{at}[{i}]") for i, part in enumerate(content))


def _part_text(part: ResponsePart, at: str) -> str:
    if part.type not in _TEXT_PARTS:
        raise UnsupportedValueError(f"{at}: the model does not take parts of type {shown(part.type)}", param=at)
    name = "refusal" if part.type == "refusal" else "text"
    return required(part.refusal if name == "refusal" else part.text, f"{at}.{name}")
