"""What a model's raw text says: reasoning, content, calls of tools. The seam of all formats.

A parser takes text in pieces of any size and tells what it is sure of; its results do not depend on how the text was
cut. Streamed and plain answers go through the same parser. Parsers know no ids, no JSON of the wire and no clock.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol


class Kind(enum.Enum):
    """What a piece is part of."""

    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()
    ARGUMENTS = enum.auto()


class Piece(NamedTuple):
    """Something that is certain.

    REASONING and CONTENT: a piece of that text. CALL: a call begins, and this is the whole name of its tool.
    ARGUMENTS: a fragment of the arguments of the call that began last; all its fragments make one JSON object, `{}`
    when it has no arguments.
    """

    kind: Kind
    text: str


def joined(pieces: list[Piece]) -> list[Piece]:
    """Join neighbours of the same kind; between two calls there are always arguments."""
    if len(pieces) < 2:
        return pieces
    runs = groupby(pieces, key=lambda piece: piece.kind)
    return [Piece(kind, "".join(piece.text for piece in run)) for kind, run in runs]


class OutputParser(Protocol):
    """Reads one output. Mutated by its two methods alone."""

    @property
    def region(self) -> Kind:
        """Where the text that was fed last lies: REASONING, CONTENT or CALL (markup and arguments included)."""

    def feed(self, text: str) -> list[Piece]:
        """Take text that is not empty; return what is certain now, without neighbours of the same kind."""

    def finish(self) -> list[Piece]:
        """The output has ended, perhaps too early: return what was still held."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; where it is strict, what cannot be enforced of it is a fault."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False


Mark = Callable[[str], str]
"""Turns a marker into Lark: its token where the vocabulary has one, else a string literal."""


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What a grammar is to allow.

    Attributes:
        tools: At least one, but where a format reads every output.
        mark: As the vocabulary has the markers.
        content: Name of a rule for answers without a call; None for free text.
        is_required: There is at least one call, and nothing before the first one.
        allows_many: There may be more than one call.
    """

    tools: Sequence[Tool]
    mark: Mark
    content: str | None = None
    is_required: bool = False
    allows_many: bool = True


class ToolFormat(Protocol):
    """How one family of models writes calls."""

    @property
    def name(self) -> str:
        """For `--tool-format` and the log."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that begin or end something, which are control tokens in most vocabularies of the family.

        The parser has to see them, so they stay in the text even when control tokens are left out of it.
        """

    def is_used_by(self, template: str) -> bool:
        """Tell from the source of its chat template whether a model writes calls like this."""

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        """A parser for an output that may call these tools; everything that is no call is content."""

    def grammar(self, wanted: AnswerRules) -> str:
        """Rules for `llguidance` in Lark; the rule `answer` is the whole output after the reasoning.

        From where a call opens, the output can only be one of these tools with arguments of its schema.
        """
