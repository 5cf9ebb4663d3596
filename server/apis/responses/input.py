"""The input of POST /v1/responses: its items are gathered, turned into messages for the template, and shortened to fit.

The items are the body's own and those of its conversation, or of the responses before it. Reasoning, a message of the
assistant and calls that follow each other are one turn, so they become one message. Items of other types become calls
and their outputs, or text (`foreign_text`). Reasoning that was sealed elsewhere is left out and reported. A
compaction that was sealed elsewhere is refused: it is the conversation itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.requests import Request

from weft.server.apis.responses.schema import OtherItem, ResponseBody, ResponseItem, ResponsePart
from weft.server.apis.responses.stored import REASONING_PREFIX, all_items, chain, find_items
from weft.server.errors import InvalidRequestError, UnsupportedValueError, shown
from weft.server.formats.parser import ToolFormat
from weft.server.http.auth import tenant_of
from weft.server.http.context import ServerContext
from weft.server.task.bodies import FunctionCall
from weft.server.task.messages import PART_SEPARATOR, call_of, function_call
from weft.server.task.parts import Spans, part_text
from weft.server.task.request_options import MAX_BREAKPOINTS, Breakpoint, content_breakpoints, usual_ttl_s
from weft.server.task.schema import PromptCacheOptions, foreign_text
from weft.server.task.task import Chat
from weft.server.task.tool_use import CUSTOM_INPUT, QualifiedName, fit_call_ids
from weft.server.task.validation import required
from weft.server.text.replayed import REASONING_PART


@dataclass(frozen=True, slots=True)
class InputItem:
    """One item, and its path in the body; items of earlier responses have a path that says so."""

    item: ResponseItem
    at: str


@dataclass(frozen=True, slots=True)
class InputItems:
    """All items of an input: those of earlier responses or of the conversation, and the body's own."""

    earlier: list[InputItem]
    own: list[InputItem]
    size: int  # bytes of the body and of the earlier items

    @property
    def all(self) -> list[InputItem]:
        """The items in the order of the prompt."""
        return [*self.earlier, *self.own]


async def input_items(body: ResponseBody, request: Request, context: ServerContext) -> InputItems:
    """All items of the input. References are resolved.

    Raises:
        InvalidRequestError: There are both.
        NotFoundError: A response, a conversation or an item is not stored.
    """
    tenant, own, wanted, id = tenant_of(request), _own_items(body), body.previous_response_id, conversation_id(body)
    if wanted is not None and id is not None:
        raise InvalidRequestError("conversation cannot be used with previous_response_id", param="conversation")
    references = {each.at: required(each.item.id, f"{each.at}.id") for each in own if _is_reference(each.item)}
    earlier: list[msgspec.Raw] = []
    if wanted is not None:
        earlier = await context.store.read(lambda transaction: chain(transaction, wanted, tenant))
    if id is not None:
        earlier = await context.store.read(lambda transaction: all_items(transaction, id, tenant))
    num_bytes = sum(map(len, earlier))
    found = {}
    if references:
        place_of = {item_id: at for at, item_id in references.items()}
        by_id = await context.store.read(lambda transaction: find_items(transaction, place_of, tenant))
        num_bytes += sum(len(by_id[item_id]) for item_id in references.values() if item_id in by_id)
        if num_bytes > context.settings.max_body_bytes:
            bound = context.settings.max_body_bytes
            message = f"input and what it refers to must have at most {bound} bytes, got {num_bytes}"
            raise InvalidRequestError(message, param="input")
        found = {at: by_id[item_id] for at, item_id in references.items() if item_id in by_id}
    place = "previous_response_id" if id is None else "conversation"
    old, new = await context.workers.run_light(
        num_bytes,
        lambda: (
            [_stored_item(item, f"{place}[{i}]") for i, item in enumerate(earlier)],
            [_stored_item(found[each.at], each.at) if each.at in found else each for each in own],
        ),
    )
    return InputItems(old, new, num_bytes + len(await request.body()))


def _stored_item(item: msgspec.Raw, at: str) -> InputItem:
    return InputItem(ResponseItem.model_validate(msgspec.json.decode(item)), at)


def conversation_id(body: ResponseBody) -> str | None:
    """The conversation that the body names; None: none."""
    given = body.conversation
    return given if given is None or isinstance(given, str) else given.id


def _is_reference(item: ResponseItem) -> bool:
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


def _own_items(body: ResponseBody) -> list[InputItem]:
    """The items of the body itself."""
    if body.input is None:
        return []
    if isinstance(body.input, str):
        return [InputItem(ResponseItem(type="message", role="user", content=body.input), "input")]
    return [InputItem(item, f"input[{i}]") for i, item in enumerate(body.input)]


SUMMARY_INTRO = "Summary of the conversation so far:\n"
"""What stands before the text of a compaction in the prompt."""
_ROLES = frozenset({"user", "system", "developer", "assistant"})
_REASONING_PARTS = frozenset({"summary_text", REASONING_PART})


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
    spans: Spans = field(default_factory=Spans)
    turn: dict[str, Any] | None = None  # the open message of the assistant
    call_ids: set[str] = field(default_factory=set)
    answered: frozenset[str] = frozenset()  # ids of calls that have an output in the input
    left_out: list[str] = field(default_factory=list)

    def add(self, index: int, item: ResponseItem, at: str) -> None:
        """Add the next item.

        Raises:
            InvalidRequestError: The item is incomplete, or answers a call that is not in the input.
            UnsupportedValueError: This server has no use for such an item, or for a part of it.
        """
        match "item_reference" if _is_reference(item) else item.type or (item.role and "message"):
            case "message":
                self._message(index, item, at)
            case "reasoning":
                if index >= self.reasoning_from and (text := self._reasoning(item, at)):
                    self._turn(("content", "tool_calls")).setdefault("reasoning_content", []).append(text)
            case "compaction":
                self.turn = None
                text = self._compaction(item, at)
                self.messages.append({"role": "assistant", "content": SUMMARY_INTRO + text})
            case "function_call":
                function = FunctionCall(name=_called_name(item, at), arguments=item.arguments or "")
                self._call(_member(item, "call_id", at), function_call(function))
            case "custom_tool_call":
                call = call_of(_called_name(item, at), {CUSTOM_INPUT: item.input or ""})
                self._call(_member(item, "call_id", at), call)
            case "function_call_output" | "custom_tool_call_output":
                self._output(item, at)
            case "item_reference" if (item.id or "").startswith(REASONING_PREFIX):
                self.left_out.append(f"{at}.id")  # of reasoning that is stored elsewhere
            case "mcp_list_tools":
                pass  # the tools are in the template's own place for them
            case "mcp_call" | "mcp_approval_request" | "mcp_approval_response":
                self._hosted(item, at)
            case _ if isinstance(item, OtherItem):
                self._other(item)
            case _:
                raise UnsupportedValueError(f"{at} must have a type or a role, got neither", param=f"{at}.type")

    def _other(self, item: OtherItem) -> None:
        id = item.shared_id
        if id in self.call_ids and item.is_output:
            self._answer_call(id, item.output_text())
        elif id in self.answered and item.is_call:
            self._call(id, call_of(*item.called()))
        else:
            turn = self._turn(("tool_calls",))
            texts = turn["content"], foreign_text(item.type, item.members)
            turn["content"] = PART_SEPARATOR.join(filter(None, texts))

    def _message(self, index: int, item: ResponseItem, at: str) -> None:
        role = _member(item, "role", at)
        if role not in _ROLES:
            bound = ", ".join(sorted(_ROLES))
            raise InvalidRequestError(f"{at}.role must be one of {bound}, got {shown(role)}", param=f"{at}.role")
        if role == "assistant":
            parts = item.content if isinstance(item.content, list) else []
            own = "".join(part.text or "" for part in parts if part.type == REASONING_PART)
            turn = self._turn(("content", "tool_calls"))
            turn["content"] = self._text(item.content, f"{at}.content", is_answer=True)
            if own and index >= self.reasoning_from:
                turn.setdefault("reasoning_content", []).append(own)
            return
        self.turn = None
        if isinstance(item.content, list):
            place, usual_s = len(self.messages), self.usual_ttl_s
            self.breakpoints += content_breakpoints(place, item.content, usual_s, f"{at}.content", self._part_text)
        self.messages.append({"role": role, "content": self._text(item.content, f"{at}.content")})

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
        self._answer_call(call_id, self._text(item.output, f"{at}.output"))

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
            function = FunctionCall(name=_called_name(item, at), arguments=item.arguments or "")
            self._call(call_id, function_call(function))
        if item.type == "mcp_call":
            error = msgspec.json.encode(item.error).decode() if item.error is not None else "none"
            output = f"The call failed: {error}" if item.output is None else self._text(item.output, f"{at}.output")
            self._answer_call(call_id, output)

    def _reasoning(self, item: ResponseItem, at: str) -> str:
        """The text of the reasoning itself, plain or sealed here, else of its summary."""
        if item.content:
            return self._text(item.content, f"{at}.content", "")
        if item.encrypted_content:
            text = self.unseal("reasoning", item.encrypted_content)
            if text is not None:
                return text
            self.left_out.append(f"{at}.encrypted_content")
        return self._text(item.summary or "", f"{at}.summary")

    def _compaction(self, item: ResponseItem, at: str) -> str:
        text = self.unseal("compaction", _member(item, "encrypted_content", at))
        if text is None:
            path = f"{at}.encrypted_content"
            message = f"{path} was not made by this server as compaction for this API key, or was changed"
            raise InvalidRequestError(message, param=path)
        return text

    def _turn(self, absent: Sequence[str]) -> dict[str, Any]:
        """The open message of the assistant; a new one if there is none, or if it has one of these members."""
        if self.turn is None or any(self.turn.get(name) is not None for name in absent):
            self.turn = {"role": "assistant", "content": None}
            self.messages.append(self.turn)
        return self.turn

    def _text(
        self,
        content: str | list[ResponsePart] | None,
        at: str,
        separator: str = PART_SEPARATOR,
        *,
        is_answer: bool = False,
    ) -> str:
        """Content as one text; that of an answer is without the reasoning in it."""
        if isinstance(content, str):
            return content
        shown = (
            (i, part) for i, part in enumerate(required(content, at)) if not (is_answer and part.type == REASONING_PART)
        )
        return separator.join(self._part_text(part, f"{at}[{i}]") for i, part in shown)

    def _part_text(self, part: ResponsePart, at: str) -> str:
        text = part.text or "" if part.type in _REASONING_PARTS else part_text(part, at, self.spans)
        if text is None:
            raise UnsupportedValueError(f"{at}: the model does not take parts of type {shown(part.type)}", param=at)
        return text


def _member(item: ResponseItem, name: str, at: str) -> str:
    value: str = required(getattr(item, name), f"{at}.{name}")
    return value


def _called_name(item: ResponseItem, at: str) -> str:
    name = _member(item, "name", at)
    return QualifiedName(item.namespace, name).flat if item.namespace else name


def input_messages(
    items: Sequence[InputItem],
    instructions: str | None,
    tools: ToolFormat | None,
    cache: PromptCacheOptions | None,
    *,
    shows_old_reasoning: bool,
    unseal: Callable[[str, str], str | None],
    may_be_empty: bool = False,
) -> Messages:
    """The messages for the template, with the last breakpoints in them.

    Args:
        tools: How the model writes calls; None: it has no tools.
        unseal: Decrypts a text of a kind; None is returned for what was not encrypted as such for this caller.
        shows_old_reasoning: Reasoning before the last message of the user is kept; the template may still drop it.
        may_be_empty: Without an item there is an empty message of the user; a client that probes the server sends none.

    Raises:
        InvalidRequestError: There is no item, or one is wrong.
    """
    if not items and may_be_empty:
        items = [InputItem(ResponseItem(role="user", content=""), "input")]
    if not items and instructions is None:
        raise InvalidRequestError("input must hold at least one item, got none", param="input")
    of_user = [i for i, each in enumerate(items) if each.item.role == "user"]
    first_shown = of_user[-1] if of_user and not shows_old_reasoning else 0
    answered = frozenset(each.item.shared_id for each in items if each.item.is_output)
    made = Messages(usual_ttl_s(cache), unseal, first_shown, answered=answered)
    if instructions is not None:
        made.messages.append({"role": "system", "content": instructions})
    for i, each in enumerate(items):
        made.add(i, each.item, each.at)
    for message in made.messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""  # the turn was cut during its reasoning
    fit_call_ids(made.messages, tools)
    made.breakpoints = made.breakpoints[-MAX_BREAKPOINTS:]
    return made


def check_items(items: Sequence[InputItem], unseal: Callable[[str, str], str | None]) -> None:
    """Check items that may follow any others, such as outputs of calls that come before them.

    Raises:
        InvalidRequestError: One is wrong.
    """
    call_ids = {id for each in items for id in (each.item.call_id, each.item.approval_request_id) if id is not None}
    made = Messages(usual_ttl_s(None), unseal, 0, call_ids=call_ids)
    for each in items:
        made.add(0, each.item, each.at)


_KEPT_ROLES = frozenset({"system", "developer"})
"""Roles of messages that stay in every shorter form."""


def shortened(chat: Chat, fits: Callable[[Chat], bool]) -> Chat:
    """The chat itself, or the longest of its shorter forms that fits; the shortest of them if none does.

    The oldest turns are left out, never the instructions or the question. A shorter form begins with a later message of
    the user, or keeps the last one of these and begins with a later answer to it. Outputs of calls stay with their
    calls. `fits` is asked a logarithmic number of times.
    """
    if fits(chat):
        return chat
    cuts = _cuts(chat.messages)
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if fits(_cut(chat, *cuts[middle])):
            high = middle
        else:
            low = middle + 1
    return _cut(chat, *cuts[low]) if cuts else chat


def _cuts(messages: list[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Where each shorter form begins, and the question that is kept before it; the longest form first."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        return []
    last = users[-1]
    answers = [i for i in range(last + 1, len(messages)) if messages[i]["role"] == "assistant"]
    return [*((i, []) for i in users[1:] or users), *((i, [messages[last]]) for i in answers[1:])]


def _cut(chat: Chat, start: int, question: list[dict[str, Any]]) -> Chat:
    kept = [message for message in chat.messages[:start] if message["role"] in _KEPT_ROLES]
    return replace(chat, messages=[*kept, *question, *chat.messages[start:]], breakpoints=())
