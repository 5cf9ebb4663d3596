"""What generating tells a renderer: the events of a choice, and what is known of the whole answer.

The seam between the two sides: every API renders the same events. Events of one choice come in lists, in order:

    TokenIds?  (Reasoning | Text | CallOpened | CallArguments | CallClosed)*  End?

Nothing follows `End`. Between `CallOpened` and its `CallClosed` come only `CallArguments`. A failure is no event: it is
raised, and becomes the error object of an API. Usage is asked for, with `Report.counts`.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from weft.engine.shared.messages import FinishReason, TokenLogprobs
from weft.server.request.task import Prompt


class Part(enum.Enum):
    """What a token is to the text: part of it, the token that ended it, or cut away by a stop string."""

    TEXT = enum.auto()
    END = enum.auto()
    CUT = enum.auto()


@dataclass(frozen=True, slots=True)
class Token:
    """One output token as a caller may see it: where its text starts, its log-probabilities if asked for."""

    token_id: int
    start: int
    logprobs: TokenLogprobs | None
    part: Part = Part.TEXT


class Text(NamedTuple):
    """Content. `tokens` are those that it is made of, if they are tracked; the text may be empty with tokens."""

    text: str
    tokens: Sequence[Token] = ()


class Reasoning(NamedTuple):
    """A piece of reasoning."""

    text: str


class CallOpened(NamedTuple):
    """A call of a tool begins."""

    name: str


class CallArguments(NamedTuple):
    """A fragment of the arguments of the open call; all its fragments make one JSON object."""

    text: str


class CallClosed(NamedTuple):
    """The open call has ended, perhaps too early; the whole of it."""

    name: str
    arguments: str


class TokenIds(NamedTuple):
    """Ids of all tokens behind the events that come with it, only if they were asked for."""

    token_ids: list[int]


class End(NamedTuple):
    """The choice has ended; `stop_reason` is the stop string or the caller's stop token id behind STOP."""

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
    """A prompt, and what the engine has said of it so far; None until it did. Written by the answer alone."""

    prompt: Prompt
    num_cached_tokens: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    logprobs_source: int | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of an answer so far: every prompt once, every choice."""

    prompt_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    output_tokens: int
    reasoning_tokens: int
    accepted_predictions: int
    rejected_predictions: int


class Report(Protocol):
    """What a renderer can ask about the answer that it writes."""

    @property
    def prompts(self) -> Sequence[PromptReport]:
        """Every prompt."""

    def prompt_of(self, index: int) -> PromptReport:
        """The prompt that choice `index` continues."""

    def counts(self) -> Counts:
        """Tokens so far."""


class Renderer(Protocol):
    """Writes the JSON of one answer of one API; a new one for each HTTP request."""

    def stream(self, index: int, events: Sequence[Event]) -> bytes:
        """The server-sent events for what choice `index` gained; b"" for none."""

    def stream_end(self) -> bytes:
        """Those behind the end of the last choice."""

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """The plain answer."""
