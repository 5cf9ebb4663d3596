"""Reasoning that a model writes before its answer: how a template shows it, how it is switched, split off, constrained.

A block lies between two markers; the newlines around the markers belong to them. It stands at the begin of the output,
unless the rendered prompt has opened it already (templates that end in `<think>`), or closed it (Qwen 3 with
`enable_thinking=False`). A block that is never closed is all there is: the whole output is reasoning.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

import jinja2

from server.parsers import lark
from server.parsers.markers import num_held
from server.parsers.parser import Kind, OutputParser, Piece


class Block(enum.Enum):
    """What the prompt has done with the block."""

    NOT_BEGUN = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


@dataclass(frozen=True, slots=True)
class Switch:
    """Variables of a template that turn reasoning on and off."""

    on: dict[str, object]
    off: dict[str, object]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How one family of models writes its reasoning.

    Attributes:
        name: For the log and for settings.
        begin, end: The markers of the block.
        sign: Templates of the family hold this text.
        answer_begin, answer_end: Markers around the answer, which are left out of it; "" where there are none.
        behind_begin: What a template may write behind `begin` apart from newlines; the block is open then, too.
    """

    name: str
    begin: str
    end: str
    sign: str
    answer_begin: str = ""
    answer_end: str = ""
    behind_begin: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """As in `ToolFormat`."""
        return tuple(filter(None, (self.begin, self.end, self.answer_begin, self.answer_end)))

    def block(self, prompt: str) -> Block:
        """Tell what a rendered prompt has done with the block of the answer that comes next; its tail suffices."""
        tail = prompt.rstrip()
        if tail.removesuffix(self.behind_begin).endswith(self.begin):
            return Block.OPEN
        return Block.CLOSED if tail.endswith(self.end) else Block.NOT_BEGUN

    def parser(self, block: Block, answer: OutputParser) -> OutputParser:
        """A parser that tells reasoning itself and hands everything behind it to the parser of the answer."""
        return answer if block is Block.CLOSED else ReasoningParser(self, block is Block.OPEN, answer)

    def grammar(self, block: Block, mark: lark.Mark) -> str:
        """Rules in Lark: `reasoning` is what comes before the answer, newlines behind the block included.

        A block that has not begun may be left out by the model.
        """
        if block is Block.CLOSED:
            return "reasoning:\n"
        rules = f"thinking: thought /\\n{{0,2}}/\n{lark.text_up_to('thought', self.end, mark)}"
        begun = "thinking" if block is Block.OPEN else f"(/\\n?/ {mark(self.begin)} thinking)?"
        return f"reasoning: {begun}\n{rules}"


THINK = ReasoningFormat("think", "<think>", "</think>", sign="</think>")
MISTRAL = ReasoningFormat("mistral", "[THINK]", "[/THINK]", sign="[/THINK]")
SEED = ReasoningFormat(
    "seed", "<seed:think>", "</seed:think>", sign="</seed:think>", behind_begin="<seed:cot_budget_reflect>"
)
GRANITE = ReasoningFormat(
    "granite", "<think>", "</think>", sign="<response></response>", answer_begin="<response>", answer_end="</response>"
)
GRANITE_PHRASES = ReasoningFormat(
    "granite_phrases", "Here is my thought process:", "Here is my response:", sign="'Here is my thought process:'"
)
ALL = (GRANITE_PHRASES, GRANITE, SEED, MISTRAL, THINK)
"""From the most to the least particular."""


def reasoning_format(template: str) -> ReasoningFormat | None:
    """The format that models of this chat template use; None: none that the template speaks of."""
    return next((format for format in ALL if format.sign in template), None)


_SWITCHES = {
    "enable_thinking": Switch(on={"enable_thinking": True}, off={"enable_thinking": False}),
    "thinking": Switch(on={"thinking": True}, off={"thinking": False}),
    "thinking_budget": Switch(on={"thinking_budget": -1}, off={"thinking_budget": 0}),
}


def reasoning_switch(template: str) -> Switch | None:
    """How a caller turns reasoning on and off; None: the template has no variable for it.

    Args:
        template: The source, which has been compiled before.
    """
    tokens = [token for token in jinja2.Environment().lex(template) if token[1] != "whitespace"]
    for name, switch in _SWITCHES.items():
        if _reads(tokens, name):
            return switch
    constants = {value[1:-1] for _, kind, value in tokens if kind == "string"}
    if "none" in constants and _reads(tokens, "reasoning_effort"):
        return Switch(on={"reasoning_effort": "high"}, off={"reasoning_effort": "none"})
    return None


def _reads(tokens: list[tuple[int, str, str]], name: str) -> bool:
    """Tell whether the template looks at a variable before it sets it itself."""
    for at, (_, kind, value) in enumerate(tokens):
        if kind == "name" and value == name and tokens[at - 1][2] != ".":
            is_assigned = tokens[at + 1][2] == "="
            if not is_assigned or tokens[at - 1][2] == "set":
                return not is_assigned
    return False


class ContentParser:
    """An `OutputParser` for outputs that are content and nothing else."""

    region = Kind.CONTENT

    def feed(self, text: str) -> list[Piece]:
        """See `OutputParser`."""
        return [Piece(Kind.CONTENT, text)]

    def finish(self) -> list[Piece]:
        """See `OutputParser`."""
        return []


class ReasoningParser:
    """An `OutputParser` for one output; mutated by its two methods alone."""

    def __init__(self, format: ReasoningFormat, is_open: bool, answer: OutputParser) -> None:
        self._format = format
        self._answer = answer
        self._read: Callable[[], list[Piece]] = self._read_reasoning if is_open else self._read_begin
        self._text = ""  # not understood yet
        self._blanks: list[str] = []  # before what may be the begin of the block, or at the end of reasoning
        self._is_first = True  # nothing of the reasoning was told

    @property
    def region(self) -> Kind:
        """See `OutputParser`."""
        if self._read == self._read_answer:
            return self._answer.region
        return Kind.CONTENT if self._read == self._read_begin else Kind.REASONING

    def feed(self, text: str) -> list[Piece]:
        """See `OutputParser`."""
        self._text += text
        pieces: list[Piece] = []
        reader = None
        while self._text and reader != self._read:  # go on with the reader that the last one has put in its place
            reader = self._read
            pieces += reader()
        return _joined(pieces) if len(pieces) > 1 else pieces

    def finish(self) -> list[Piece]:
        """See `OutputParser`."""
        rest, self._text, self._blanks = "".join([*self._blanks, self._text]), "", []
        if self._read == self._read_reasoning:
            return [Piece(Kind.REASONING, rest)] if rest else []
        return _joined([*(self._answer.feed(rest) if rest else []), *self._answer.finish()])

    def _read_begin(self) -> list[Piece]:
        stripped = self._text.lstrip(" \t\r\n")
        begin = self._format.begin
        self._blanks.append(self._text[: len(self._text) - len(stripped)])
        self._text = stripped
        if stripped.startswith(begin):
            self._blanks.clear()
            self._text = stripped.removeprefix(begin)
            self._read = self._read_reasoning
        elif not begin.startswith(stripped):
            self._text = "".join([*self._blanks, stripped])
            self._blanks.clear()
            self._read = self._read_answer
        return []

    def _read_reasoning(self) -> list[Piece]:
        pieces: list[Piece] = []
        at = self._text.find(self._format.end)
        known = at if at >= 0 else len(self._text) - num_held(self._text, (self._format.end,))
        told, self._text = self._text[:known], self._text[known:]
        if self._is_first:
            told = told.lstrip("\n")
        ended = told.rstrip("\n")
        if ended:
            pieces = [Piece(Kind.REASONING, "".join([*self._blanks, ended]))]
            self._blanks.clear()
            self._is_first = False
        if len(ended) < len(told):
            self._blanks.append(told[len(ended) :])
        if at >= 0:
            self._blanks.clear()
            self._text = self._text.removeprefix(self._format.end)
            self._read = self._read_gap
        return pieces

    def _read_gap(self) -> list[Piece]:
        """Skip newlines, the marker of the answer, and newlines again."""
        self._text = self._text.lstrip("\n")
        begin = self._format.answer_begin
        if begin and self._text.startswith(begin):
            self._text = self._text.removeprefix(begin)
            self._read = self._read_second_gap
        elif self._text and not (begin and begin.startswith(self._text)):
            self._read = self._read_answer
        return []

    def _read_second_gap(self) -> list[Piece]:
        self._text = self._text.lstrip("\n")
        if self._text:
            self._read = self._read_answer
        return []

    def _read_answer(self) -> list[Piece]:
        *before, last = self._text.split(self._format.answer_end) if self._format.answer_end else [self._text]
        held = num_held(last, (self._format.answer_end,)) if self._format.answer_end else 0
        told, self._text = "".join(before) + last[: len(last) - held], last[len(last) - held :]
        return self._answer.feed(told) if told else []


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Join neighbours of the same kind; calls stay apart."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].kind is piece.kind is not Kind.CALL:
            piece = Piece(piece.kind, joined.pop().text + piece.text)
        joined.append(piece)
    return joined
