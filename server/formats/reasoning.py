"""Reasoning that a model writes before its answer: how a template shows it, how it is switched, split off, constrained.

A block lies between two markers; the newlines around the markers belong to them. It stands at the begin of the output,
unless the rendered prompt has opened it already (templates that end in `<think>`), or closed it (Qwen 3 with
`enable_thinking=False`). A block that is never closed is all there is: the whole output is reasoning.
"""

import enum
import re
from dataclasses import dataclass

import jinja2

from weft.server.formats import lark
from weft.server.formats.parser import Kind, Mark, OutputParser, Piece
from weft.server.formats.scanner import Scanner, Steps

_NEWLINES = re.compile(r"\n*")
_ANYTHING = re.compile(r"(?s:.*)")


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

    def grammar(self, block: Block, mark: Mark) -> str:
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
    """How a caller turns reasoning on and off; None: the template has no variable for it."""
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


class ReasoningParser(Scanner):
    """An `OutputParser` that hands what is behind the reasoning to another one."""

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
            if (yield from self._read_reasoning()) is None:
                return
        self._feed_answer(self._release())
        if format.answer_end:
            while (yield from self._until((format.answer_end,), self._feed_answer)):
                pass
        else:
            yield from self._run(_ANYTHING, self._feed_answer)
        self._pieces += self._answer.finish()

    def _read_reasoning(self) -> Steps[str | None]:
        """Read the block and what is around the answer's own marker; None: the output has ended before."""
        self._drop_blanks()  # so are newlines at its begin
        end = yield from self._until((self._format.end,), lambda text: self._tell_trimmed(Kind.REASONING, text, "\n"))
        if end is None:
            self._tell_blanks(Kind.REASONING)
            return None
        self._drop_blanks()
        yield from self._run(_NEWLINES)
        if self._format.answer_begin and (yield from self._next(self._format.answer_begin, skips_blanks=False)):
            yield from self._run(_NEWLINES)
        return end

    def _feed_answer(self, text: str) -> None:
        if text:
            self._pieces += self._answer.feed(text)
            self.region = self._answer.region
