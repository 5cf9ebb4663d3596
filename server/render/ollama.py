"""Renders events in Ollama's shape: a JSON object, or one a line.

Does no I/O. Calls are written whole, as Ollama writes them.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from weft.server.errors import ApiError
from weft.server.generate.events import CallClosed, End, Event, Reasoning, Report, Text, WholeChoice
from weft.server.http.error_shapes import ollama_error
from weft.server.http.sse import Framing
from weft.server.render.common import FINISH_WORDS
from weft.server.render.stopwatch import Stopwatch
from weft.server.schemas.ollama import MessageMember, OllamaAnswer, ToolCallFunction, ToolCallMember
from weft.server.task.task import Task

FRAMING = Framing("application/x-ndjson", ping=b"", after_ping=b"")


def time_text(seconds: float | None = None) -> str:
    """A time as Ollama writes it; None: now."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat().replace("+00:00", "Z")


class OllamaRenderer:
    """Writes one answer. Only `stream` mutates it: it counts calls, and keeps the end."""

    def __init__(self, task: Task, report: Report, *, is_chat: bool) -> None:
        """Prepare to write an answer to /api/chat, or else to /api/generate; writes nothing yet."""
        self._report = report
        self._model = task.name
        self._is_chat = is_chat
        self._watch = Stopwatch()
        self._num_calls = 0
        self._end: End | None = None

    def stream(self, index: int, events: Sequence[Event]) -> bytes:
        """A line for each event that has something to show."""
        self._watch.note_event()
        return b"".join(map(self._written, events))

    def stream_end(self) -> bytes:
        """The line that ends the answer."""
        assert self._end is not None, "every choice ends"
        return self._line(self._done(self._answer("", "", []), self._end))

    def stream_error(self, error: ApiError) -> bytes:
        """The error as the last line."""
        return ollama_error(error) + b"\n"

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """The whole plain answer."""
        (choice,) = choices
        calls = [self._call(call) for call in choice.calls]
        return msgspec.json.encode(self._done(self._answer(choice.text, choice.reasoning, calls), choice.end))

    def _written(self, event: Event) -> bytes:
        match event:
            case Text() if event.text:
                return self._line(self._answer(event.text, "", []))
            case Reasoning():
                return self._line(self._answer("", event.text, []))
            case CallClosed():
                return self._line(self._answer("", "", [self._call(event)]))
            case End():
                self._end = event
        return b""

    def _answer(self, text: str, thinking: str, calls: list[ToolCallMember]) -> OllamaAnswer:
        answer = OllamaAnswer(model=self._model, created_at=time_text())
        shown: Any = answer
        if self._is_chat:
            shown = answer.message = MessageMember(text)
        else:
            answer.response = text
        if thinking:
            shown.thinking = thinking
        if calls:
            shown.tool_calls = calls
        return answer

    def _call(self, call: CallClosed) -> ToolCallMember:
        try:
            arguments = msgspec.json.decode(call.arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            arguments = {}  # the output ended within it
        self._num_calls += 1
        return ToolCallMember(ToolCallFunction(call.name, arguments, self._num_calls - 1))

    def _done(self, answer: OllamaAnswer, end: End) -> OllamaAnswer:
        counts = self._report.counts()
        prompt_ns, output_ns = (int(seconds * 1e9) for seconds in self._watch.read())
        answer.done, answer.done_reason = True, FINISH_WORDS[end.reason]
        answer.total_duration, answer.load_duration = prompt_ns + output_ns, 0
        answer.prompt_eval_count, answer.prompt_eval_duration = counts.prompt_tokens, prompt_ns
        answer.eval_count, answer.eval_duration = counts.output_tokens, output_ns
        return answer

    def _line(self, answer: OllamaAnswer) -> bytes:
        return msgspec.json.encode(answer) + b"\n"
