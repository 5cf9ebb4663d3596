"""Renders events as the JSON of POST /v1/responses, streamed or plain.

Both go through the same state, so the items and ids of the events are those of the final response. Does no I/O.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from weft.engine.wire.messages import FinishReason
from weft.server.apis.openai.calls import custom_input, new_call_id
from weft.server.apis.openai.render import obfuscation, shown_tokens
from weft.server.apis.responses import answers as wire
from weft.server.apis.responses.answers import McpApprovalRequestItem, McpCallItem, McpListToolsItem, McpTool
from weft.server.apis.responses.mcp_tools import ApprovedCall
from weft.server.apis.responses.stored import item_id
from weft.server.errors import ApiError, error_text
from weft.server.generate import events as generated
from weft.server.generate.events import CallArguments, CallClosed, CallOpened, Event, Reasoning, Text
from weft.server.http.sse import encode_event
from weft.server.task.schema import CachedTokens
from weft.server.task.task import Task

_NO_ANSWERS = wire.ReasoningItem | McpListToolsItem | McpCallItem


@dataclass(slots=True)
class _Open:
    """The item that is being written."""

    item: wire.OutputItem
    index: int
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What the answer shows. `logprobs`: number of alternatives per token; None: no log-probabilities."""

    logprobs: int | None
    obfuscation: bool
    seal: Callable[[str, str], str] | None = None  # how reasoning is encrypted; None: it is not


class ResponseRenderer:
    """Writes one response. Its own methods mutate it, and the response, which holds what has been written so far."""

    def __init__(
        self, task: Task, response: wire.ResponseObject, options: ResponseOptions, report: generated.Report
    ) -> None:
        """Prepare to write; `response` has no output yet."""
        self.response = response
        self._options = options
        self._report = report
        self._tokenizer = task.model.tokenizer
        self._custom_names = task.wishes.use.custom_names if task.wishes.use else frozenset()
        self._hosted = task.wishes.use.hosted if task.wishes.use else {}
        self._qualified = task.wishes.use.qualified if task.wishes.use else {}
        self._calls: deque[_Open] = deque()  # of hosted tools, written and without a result
        self._is_prewarm = task.sampling.max_tokens == 0
        self._num_events = 0
        self._open: _Open | None = None
        self._held: list[generated.Token] = []  # tokens without text, before the message has begun

    def stream(self, index: int, events: Sequence[Event]) -> bytes:
        """The events for new text, reasoning and calls."""
        return b"".join([self.begin(), *(self._written(event) for event in events)])

    def stream_end(self) -> bytes:
        """The last event, which holds the whole response."""
        self.finish()
        return self._response_event(self.response.status)

    def stream_error(self, error: ApiError) -> bytes:
        """The last events of a response that failed."""
        data = self._cut()
        self.fail(error)
        return data + self._response_event("failed")

    def stream_cancelled(self) -> bytes:
        """The last events of a response that was cancelled; streams of OpenAI's have no event of that name."""
        data = self._cut()
        self.response.status = "cancelled"
        return data + self._response_event("incomplete")

    def whole(self, choices: Sequence[generated.WholeChoice]) -> bytes:
        """The whole plain response."""
        (choice,) = choices
        events: list[Event] = [Reasoning(choice.reasoning), Text(choice.text, choice.tokens)]
        for call in choice.calls:
            events += [CallOpened(call.name), CallArguments(call.arguments), call]
        self.stream(0, [*events, choice.end])
        self.finish()
        return msgspec.json.encode(self.response)

    def listed(self, label: str, tools: Sequence[McpTool], error: str | None) -> bytes:
        """The events of the list of a server's tools, after the first events of all."""
        item = McpListToolsItem(self._new_id("mcpl"), label)
        data = self.begin() + self._add(item) + self._item_event("mcp_list_tools.in_progress")
        item.tools, item.error = list(tools), error
        data += self._item_event(f"mcp_list_tools.{'completed' if error is None else 'failed'}")
        return data + self._done()

    def approved(self, call: ApprovedCall) -> bytes:
        """The first events of a call that the client has approved."""
        item = McpCallItem(self._new_id("mcp"), call.label, call.name, approval_request_id=call.request_id)
        data = self.begin() + self._add(item) + self._item_event("mcp_call.in_progress")
        return data + self._delta("mcp_call_arguments", call.arguments) + self._close("completed")

    def called(self, output: str | None, error: dict[str, object] | None) -> bytes:
        """The last events of the oldest call of a hosted tool that has no result: this one."""
        data = self._close("completed")
        self._open = self._calls.popleft()
        item = self._open.item
        assert isinstance(item, McpCallItem), "only these calls wait for a result"
        item.output, item.error = output, error
        item.status = "completed" if error is None else "failed"
        return data + self._item_event(f"mcp_call.{item.status}") + self._done()

    def begin(self) -> bytes:
        """The first events; nothing if they have been written."""
        if self._num_events:
            return b""
        queued = b""
        if self.response.background:
            self.response.status = "queued"
            queued = self._response_event("created") + self._response_event("queued")
        self.response.status = "in_progress"
        return (queued or self._response_event("created")) + self._response_event("in_progress")

    def fail(self, error: ApiError) -> None:
        """Note a failure in the response."""
        code: wire.FailureCode = "server_error"
        if error.status < 500:
            code = "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
        self.response.status = "failed"
        self.response.error = wire.ResponseFailure(code, error_text(error), error.type, error.param)

    def finish(self) -> None:
        """Complete the response, of which every event has been written."""
        self.response.usage = usage_of(self._report.counts())
        if self.response.status == "completed" and self.response.completed_at is None:
            self.response.completed_at = int(time.time())

    def _written(self, event: Event) -> bytes:
        match event:
            case Text():
                return self._text(event)
            case Reasoning() if event.text:
                data = self._opened(wire.ReasoningItem, "rs")
                return data + self._delta("reasoning_text", event.text, content_index=0)
            case CallOpened():
                return self._close("completed") + self._begin_call(event.name)
            case CallArguments() if isinstance(self._item, wire.FunctionCallItem):
                return self._delta("function_call_arguments", event.text)
            case CallArguments() if isinstance(self._item, McpCallItem):
                return self._delta("mcp_call_arguments", event.text)
            case CallClosed():
                return self._end_call(event)
            case generated.End():
                return self._end(event)
        return b""

    @property
    def _item(self) -> wire.OutputItem | None:
        return self._open.item if self._open else None

    def _text(self, event: Text) -> bytes:
        if not event.text and not isinstance(self._item, wire.MessageItem):
            self._held += event.tokens
            return b""
        data = self._opened(wire.MessageItem, "msg")
        assert isinstance(self._item, wire.MessageItem)
        tokens, self._held = [*self._held, *event.tokens], []
        count = self._options.logprobs
        logprobs = [] if count is None else shown_tokens(tokens, count, self._tokenizer)
        self._item.content[0].logprobs += logprobs
        return data + self._delta("output_text", event.text, content_index=0, logprobs=logprobs)

    def _begin_call(self, name: str) -> bytes:
        if tool := self._hosted.get(name):
            if tool.needs_approval:
                return self._add(McpApprovalRequestItem(self._new_id("mcpr"), tool.label, tool.name))
            item = McpCallItem(self._new_id("mcp"), tool.label, tool.name)
            return self._add(item) + self._item_event("mcp_call.in_progress")
        call: wire.CustomCallItem | wire.FunctionCallItem
        if name in self._custom_names:
            call = wire.CustomCallItem(self._new_id("ctc"), new_call_id(), name)
        else:
            call = wire.FunctionCallItem(self._new_id("fc"), new_call_id(), name)
        if qualified := self._qualified.get(name):
            call.namespace, call.name = qualified.namespace, qualified.name
        return self._add(call)

    def _end_call(self, event: CallClosed) -> bytes:
        item, data = self._item, b""
        if isinstance(item, wire.CustomCallItem):  # its input is a string inside JSON, so it is sent whole
            item.input = custom_input(event.arguments)
            data = self._delta("custom_tool_call_input", item.input)
        elif isinstance(item, wire.FunctionCallItem | McpCallItem | McpApprovalRequestItem):
            item.arguments = event.arguments
        return data + self._close("completed" if _is_json(event.arguments) else "incomplete")

    def _end(self, event: generated.End) -> bytes:
        is_cut = event.reason is FinishReason.LENGTH and not self._is_prewarm
        self.response.status = "incomplete" if is_cut else "completed"
        self.response.incomplete_details = wire.IncompleteDetails() if is_cut else None
        data = self._close(self.response.status) + self._give_up()
        items = self.response.output
        has_answer = any(not isinstance(item, _NO_ANSWERS) for item in items)
        if has_answer or self._is_prewarm or (is_cut and items):
            return data
        data += self._opened(wire.MessageItem, "msg")  # the answer is an empty text
        return data + self._text(Text("")) + self._close(self.response.status)

    def _opened(self, kind: type[wire.MessageItem] | type[wire.ReasoningItem], prefix: str) -> bytes:
        """Open an item of this kind, unless one is open."""
        if isinstance(self._item, kind):
            return b""
        data = self._close("completed")
        item = kind(self._new_id(prefix))
        data += self._add(item)
        if isinstance(item, wire.MessageItem):
            item.content = [wire.OutputText()]
        else:
            item.content = [wire.ReasoningText()]
        return data + self._item_event("content_part.added", content_index=0, part=item.content[0])

    def _add(self, item: wire.OutputItem) -> bytes:
        self._open = _Open(item, len(self.response.output))
        self.response.output = [*self.response.output, item]
        return self._event("response.output_item.added", output_index=self._open.index, item=item)

    def _close(self, status: str) -> bytes:
        """The last events of the open item; nothing if there is none."""
        if self._open is None:
            return b""
        item, text, data = self._open.item, "".join(self._open.texts), b""
        if isinstance(item, McpCallItem):  # it ends with its result
            item.arguments = item.arguments or text
            data = self._item_event("mcp_call_arguments.done", arguments=item.arguments)
            self._calls.append(self._open)
            self._open = None
            return data
        if isinstance(item, McpApprovalRequestItem | McpListToolsItem):
            return self._done()
        item.status = status
        if isinstance(item, wire.FunctionCallItem):
            item.arguments = item.arguments or text
            done = {"name": item.name, "arguments": item.arguments}
            data = self._item_event("function_call_arguments.done", **done)
        elif isinstance(item, wire.CustomCallItem):
            data = self._item_event("custom_tool_call_input.done", input=item.input)
        else:
            part = item.content[0]
            part.text = text
            if isinstance(item, wire.ReasoningItem) and self._options.seal:
                item.encrypted_content = self._options.seal("reasoning", text)
            kind = "output_text" if isinstance(part, wire.OutputText) else "reasoning_text"
            logprobs = {"logprobs": part.logprobs} if isinstance(part, wire.OutputText) else {}
            data = self._item_event(f"{kind}.done", content_index=0, text=text, **logprobs)
            data += self._item_event("content_part.done", content_index=0, part=part)
        return data + self._done()

    def _done(self) -> bytes:
        assert self._open is not None, "an item is open"
        done, self._open = self._open, None
        return self._event("response.output_item.done", output_index=done.index, item=done.item)

    def _cut(self) -> bytes:
        """The last events of all open items."""
        return self.begin() + self._close("incomplete") + self._give_up()

    def _give_up(self) -> bytes:
        """The last events of calls of hosted tools that will have no result."""
        data = b""
        while self._calls:
            self._open = self._calls.popleft()
            assert isinstance(self._open.item, McpCallItem), "only these calls wait for a result"
            self._open.item.status = "incomplete"
            data += self._done()
        return data

    def _delta(self, kind: str, text: str, **members: object) -> bytes:
        assert self._open is not None, "deltas belong to an item"
        self._open.texts.append(text)
        if self._options.obfuscation:
            members["obfuscation"] = obfuscation(text)
        return self._item_event(f"{kind}.delta", delta=text, **members)

    def _item_event(self, kind: str, **members: object) -> bytes:
        assert self._open is not None, "these events belong to an item"
        at = {"item_id": self._open.item.id, "output_index": self._open.index}
        return self._event(f"response.{kind}", **at, **members)

    def _new_id(self, prefix: str) -> str:
        return item_id(prefix, self.response.id, len(self.response.output))

    def _response_event(self, kind: str) -> bytes:
        return self._event(f"response.{kind}", response=self.response)

    def _event(self, kind: str, **members: object) -> bytes:
        number = self._num_events
        self._num_events += 1
        return encode_event({"type": kind, "sequence_number": number, **members}, kind)


def usage_of(counts: generated.Counts) -> wire.ResponseUsage:
    """Token counts in the API's shape."""
    return wire.ResponseUsage(
        counts.prompt_tokens,
        CachedTokens(counts.cached_tokens, counts.cache_write_tokens),
        counts.output_tokens,
        wire.OutputDetails(counts.reasoning_tokens),
        counts.prompt_tokens + counts.output_tokens,
    )


def error_event(error: ApiError, number: int = 0) -> bytes:
    """The event for a failure of a stream of which no response can be told: flat, as SDKs want it."""
    fields = {"code": error.code, "message": error_text(error), "param": error.param, "sequence_number": number}
    return encode_event({"type": "error", **fields}, "error")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
