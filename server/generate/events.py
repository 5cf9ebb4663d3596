"""Defines the events of a choice, and the protocols between generation and an API's renderer.

Every API renders the same events. Events of one choice come in lists, in this order:

    TokenIds?  (Reasoning | Text | CallOpened | CallArguments | CallClosed)*  End?

Nothing follows `End`. Only `CallArguments` come between a `CallOpened` and its `CallClosed`. A failure is not an event:
it is raised. `Renderer.stream_error` writes it into an open stream; before that it is the error response of the server,
which is the same for every API. Renderers get usage from `Report.counts`.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from weft.engine.wire.messages import FinishReason, TokenLogprobs
from weft.server.errors import ApiError
from weft.server.task.task import Prompt


class Part(enum.Enum):
    """A token's role in the text: part of it, the stop token that ended it, or cut away by a stop string."""

    TEXT = enum.auto()
    END = enum.auto()
    CUT = enum.auto()


@dataclass(frozen=True, slots=True)
class Token:
    """One output token as shown to callers: the offset of its text, and its log-probabilities if requested."""

    token_id: int
    start: int
    logprobs: TokenLogprobs | None
    part: Part = Part.TEXT


class Text(NamedTuple):
    """Content. `tokens` holds the tokens of the text if they are tracked. Even an empty text may have tokens."""

    text: str
    tokens: Sequence[Token] = ()


class Reasoning(NamedTuple):
    """A piece of reasoning."""

    text: str


class CallOpened(NamedTuple):
    """A tool call begins."""

    name: str


class CallArguments(NamedTuple):
    """A fragment of the open call's arguments. All fragments together are one JSON object."""

    text: str


class CallClosed(NamedTuple):
    """The open call has ended, perhaps before it was complete. Holds the whole call."""

    name: str
    arguments: str


class TokenIds(NamedTuple):
    """Ids of all tokens of the events in the same list. Sent only if requested."""

    token_ids: list[int]


class End(NamedTuple):
    """The choice has ended. For STOP, `stop_reason` is the stop string or the caller's stop token id."""

    reason: FinishReason
    stop_reason: str | int | None = None


Event = Text | Reasoning | CallOpened | CallArguments | CallClosed | TokenIds | End


@dataclass(slots=True)
class WholeChoice:
    """All events of one choice, joined. `index` is its number in the engine."""

    index: int
    text: str
    reasoning: str
    end: End
    tokens: list[Token] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    calls: list[CallClosed] = field(default_factory=list)


def whole_choice(index: int, events: Sequence[Event]) -> WholeChoice:
    """Join the events of a choice that has ended."""
    end = events[-1]
    assert isinstance(end, End)
    choice = WholeChoice(index, _joined(events, Text), _joined(events, Reasoning), end)
    for event in events:
        match event:
            case Text():
                choice.tokens += event.tokens
            case TokenIds():
                choice.token_ids += event.token_ids
            case CallClosed():
                choice.calls.append(event)
    return choice


def _joined(events: Iterable[Event], kind: type[Text] | type[Reasoning]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


@dataclass(slots=True)
class PromptReport:
    """A prompt, and what the engine has reported about it; None until then. Only the answer mutates it."""

    prompt: Prompt
    num_cached_tokens: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    logprobs_source: int | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Token counts of an answer so far. Each prompt counts once; all choices count."""

    prompt_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    output_tokens: int
    reasoning_tokens: int
    accepted_predictions: int
    rejected_predictions: int


class Report(Protocol):
    """What a renderer can ask about its answer."""

    @property
    def prompts(self) -> Sequence[PromptReport]:
        """All prompts."""

    def prompt_of(self, index: int) -> PromptReport:
        """The prompt of choice `index`."""

    def counts(self) -> Counts:
        """Token counts so far."""


class Renderer(Protocol):
    """Writes one answer, for one API. Each HTTP request has a renderer of its own."""

    def stream(self, index: int, events: Sequence[Event]) -> bytes:
        """The server-sent events for the new events of choice `index`; b"" for none."""

    def stream_end(self) -> bytes:
        """Everything in the stream after the end of the last choice."""

    def stream_error(self, error: ApiError) -> bytes:
        """Everything in the stream after the last event, if the answer fails. `stream_end` is not called then."""

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """The whole plain answer."""
