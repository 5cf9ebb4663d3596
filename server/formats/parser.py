"""The seam of all formats: what a parser and a tool format are, and the pieces that a parser tells.

A parser takes text in pieces of any size and tells what is certain. Its results do not depend on how the text was cut.
Streamed and plain answers go through the same parser. Parsers know no ids, no JSON of the wire and no clock.
"""

import enum
import re
from abc import ABC, abstractmethod
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
    """A part of the output that is certain.

    REASONING and CONTENT: a piece of that text. CALL: a call begins; the text is the whole name of its tool.
    ARGUMENTS: a fragment of the arguments of the call that began last. All its fragments together are one JSON object,
    `{}` when the call has no arguments.
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
    """Reads one output. Only its two methods mutate it.

    Attributes:
        region: Where the text that was fed last lies: REASONING, CONTENT or CALL (markup and arguments included).
    """

    region: Kind

    def feed(self, text: str) -> list[Piece]:
        """Take text that is not empty; return what is certain now, without neighbours of the same kind."""

    def finish(self) -> list[Piece]:
        """The output has ended, perhaps too early: return what was still held."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. If it is strict, a part of its schema that cannot be enforced is an error."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False


Mark = Callable[[str], str]
"""Turns a marker into Lark: its token if the vocabulary has one, else a string literal."""


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What a grammar allows.

    Attributes:
        tools: At least one, except for a format that reads every output.
        mark: Writes markers as the vocabulary has them.
        content: Name of the rule for answers without a call; None for free text.
        is_required: There is at least one call, and nothing before the first one.
        allows_many: There may be more than one call.
    """

    tools: Sequence[Tool]
    mark: Mark
    content: str | None = None
    is_required: bool = False
    allows_many: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat(ABC):
    """How one family of models writes calls.

    Attributes:
        name: For `--tool-format` and the log.
        models: The models that write it, for the documentation.
        markers: Texts that begin or end something. They are control tokens in most vocabularies of the family. The
            parser has to see them, so they stay in the text even where control tokens are left out of it.
        present: Patterns that all occur in the chat templates of the family.
        absent: Patterns of which none occurs in them.
        call_id: The id of a call as the templates want it, with `{index}` and `{name}`; "": any id will do.
        call_id_pattern: What such ids match.
    """

    name: str
    models: str
    markers: tuple[str, ...]
    present: tuple[str, ...]
    absent: tuple[str, ...] = ()
    call_id: str = ""
    call_id_pattern: str = ""

    def is_used_by(self, template: str) -> bool:
        """Tell from the source of its chat template whether a model writes calls in this format."""
        return all(re.search(sign, template) for sign in self.present) and not any(
            re.search(sign, template) for sign in self.absent
        )

    @abstractmethod
    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        """Make a parser for an output that may call these tools; everything that is not a call is content."""

    @abstractmethod
    def grammar(self, wanted: AnswerRules) -> str:
        """Write rules for `llguidance` in Lark; the rule `answer` is the whole output after the reasoning.

        Once a call has opened, the output can only be one of these tools with arguments of its schema.
        """
