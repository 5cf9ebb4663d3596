"""Reasoning formats: found in a template, switched on and off, parsed and constrained.

A reasoning block lies between two markers; the newlines around the markers belong to them. It stands at the beginning
of the output, unless the rendered prompt has already opened it (templates that end in `<think>`) or closed it (Qwen 3
with `enable_thinking=False`). If a block is never closed, the whole output is reasoning.
"""

import enum
import re
from dataclasses import dataclass

import jinja2
from typing_extensions import override

from weft.server.formats import lark
from weft.server.formats.parser import Kind, Mark, OutputParser, Piece
from weft.server.formats.scanner import Scanner, Steps

_NEWLINES = re.compile(r"\n*")
_ANYTHING = re.compile(r"(?s:.*)")


class ReasoningBlock(enum.Enum):
    """What the prompt has done with the reasoning block."""

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
        sign: Occurs in the chat templates of the family; "" stands for `end`.
        answer_begin, answer_end: Markers around the answer, which are not part of it; "" where there are none.
        behind_begin: What a template may write after `begin` besides newlines; the block is open then, too.
    """

    name: str
    begin: str
    end: str
    sign: str = ""
    answer_begin: str = ""
    answer_end: str = ""
    behind_begin: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """As in `ToolFormat`."""
        return tuple(filter(None, (self.begin, self.end, self.answer_begin, self.answer_end)))

    def block(self, prompt: str) -> ReasoningBlock:
        """Tell what a rendered prompt has done with the block of the next answer; the prompt's end suffices."""
        tail = prompt.rstrip()
        if tail.removesuffix(self.behind_begin).endswith(self.begin):
            return ReasoningBlock.OPEN
        return ReasoningBlock.CLOSED if tail.endswith(self.end) else ReasoningBlock.NOT_BEGUN

    def parser(self, block: ReasoningBlock, answer: OutputParser) -> OutputParser:
        """Make a parser that tells reasoning and hands everything after it to the parser of the answer."""
        return answer if block is ReasoningBlock.CLOSED else ReasoningParser(self, block is ReasoningBlock.OPEN, answer)

    def grammar(self, block: ReasoningBlock, mark: Mark) -> str:
        """Write rules in Lark: `reasoning` is what comes before the answer, newlines after the block included.

        The model may leave out a block that has not begun.
        """
        if block is ReasoningBlock.CLOSED:
            return "reasoning:\n"
        rules = f"thinking: thought /\\n{{0,2}}/\n{lark.text_up_to('thought', self.end, mark)}"
        begun = "thinking" if block is ReasoningBlock.OPEN else f"(/\\n?/ {mark(self.begin)} thinking)?"
        return f"reasoning: {begun}\n{rules}"


THINK = ReasoningFormat("think", "<think>", "</think>")
MISTRAL = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
SEED = ReasoningFormat("seed", "<seed:think>", "</seed:think>", behind_begin="<seed:cot_budget_reflect>")
GRANITE = ReasoningFormat(
    "granite", "<think>", "</think>", sign="<response></response>", answer_begin="<response>", answer_end="</response>"
)
GRANITE_PHRASES = ReasoningFormat(
    "granite_phrases", "Here is my thought process:", "Here is my response:", sign="'Here is my thought process:'"
)
ALL = (GRANITE_PHRASES, GRANITE, SEED, MISTRAL, THINK)
"""From the most specific to the least; the first whose sign occurs in a template is taken."""


def reasoning_format(template: str) -> ReasoningFormat | None:
    """The format that models of this chat template use; None: the template shows none."""
    return next((format for format in ALL if (format.sign or format.end) in template), None)


_SWITCHES: tuple[tuple[str, object, object], ...] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("thinking_budget", -1, 0),
    ("reasoning_effort", "high", "none"),
)
"""Variables of templates, with their values for on and off; the first that a template reads is its switch."""


def reasoning_switch(template: str) -> Switch | None:
    """How a caller turns reasoning on and off; None: the template has no variable for it."""
    tokens = [token for token in jinja2.Environment().lex(template) if token[1] != "whitespace"]
    words = {value[1:-1] for _, kind, value in tokens if kind == "string"}
    for name, on, off in _SWITCHES:
        if _reads(tokens, name) and (off != "none" or off in words):
            return Switch({name: on}, {name: off})
    return None


def _reads(tokens: list[tuple[int, str, str]], name: str) -> bool:
    """Tell whether the template reads a variable before it sets it."""
    for at, (_, kind, value) in enumerate(tokens):
        if kind == "name" and value == name and tokens[at - 1][2] != ".":
            is_assigned = tokens[at + 1][2] == "="
            if not is_assigned or tokens[at - 1][2] == "set":
                return not is_assigned
    return False


class ContentParser(OutputParser):
    """Reads outputs that are content and nothing else."""

    region = Kind.CONTENT

    @override
    def feed(self, text: str) -> list[Piece]:
        return [Piece(Kind.CONTENT, text)]

    @override
    def finish(self) -> list[Piece]:
        return []


class ReasoningParser(Scanner):
    """Reads reasoning and hands what follows it to the parser of the answer."""

    def __init__(self, format: ReasoningFormat, is_open: bool, answer: OutputParser) -> None:
        self._format = format
        self._is_open = is_open
        self._answer = answer
        super().__init__()

    def _read(self) -> Steps[None]:
        format = self._format
        self._hold()
        if self._is_open or (yield from self._next(format.begin)):
            self._release()
            self.region = Kind.REASONING
            self._drop_blanks()  # newlines at the beginning are markup
            if (yield from self._until((format.end,), self._tell_reasoning)) is None:
                self._tell_blanks(Kind.REASONING)
                return
            self._drop_blanks()
            yield from self._run(_NEWLINES)
            if format.answer_begin and (yield from self._next(format.answer_begin, skips_blanks=False)):
                yield from self._run(_NEWLINES)
        self._feed_answer(self._release())
        if format.answer_end:
            while (yield from self._until((format.answer_end,), self._feed_answer)):
                pass
        else:
            yield from self._run(_ANYTHING, self._feed_answer)
        self._pieces += self._answer.finish()

    def _tell_reasoning(self, text: str) -> None:
        self._tell_trimmed(Kind.REASONING, text, "\n")

    def _feed_answer(self, text: str) -> None:
        if text:
            self._pieces += self._answer.feed(text)
            self.region = self._answer.region
