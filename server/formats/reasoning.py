"""Reasoning formats: found in a template, switched on and off, parsed and constrained.

A reasoning block lies between two markers; the newlines around the markers belong to them. It stands at the beginning
of the output, unless the rendered prompt has already opened it (templates that end in `<think>`) or closed it (Qwen 3
with `enable_thinking=False`). If a block is never closed, the whole output is reasoning. Some families put markers
around the answer as well, with reasoning or without. They are no part of the answer.

Sources: the chat templates of the checkpoints.
"""

import enum
import re
from dataclasses import dataclass
from functools import partial

import jinja2
from typing_extensions import override

from weft.server.formats import grammar as lark
from weft.server.formats.parser import Kind, Mark, OutputParser, Piece, Scanner, Steps
from weft.server.formats.shared_rules import text_up_to

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
        models: The models that write it, for the documentation.
        sign: Occurs in the chat templates of the family; "" stands for `end`.
        answer_begin, answer_end: Markers around the answer, which are not part of it; "" where there are none.
        tokens: The control tokens in the markers, if these consist of several.
        behind_begin: What a template may write after `begin` besides newlines; the block is open then, too.
    """

    name: str
    models: str
    begin: str
    end: str
    sign: str = ""
    answer_begin: str = ""
    answer_end: str = ""
    behind_begin: str = ""
    tokens: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """As in `ToolFormat`."""
        return self.tokens or tuple(filter(None, (self.begin, self.end, self.answer_begin, self.answer_end)))

    def block(self, prompt: str) -> ReasoningBlock:
        """Tell what a rendered prompt has done with the block of the next answer; the prompt's end suffices."""
        tail = prompt.rstrip()
        if tail.removesuffix(self.behind_begin).endswith(self.begin):
            return ReasoningBlock.OPEN
        is_closed = tail.endswith(tuple(filter(None, (self.end, self.answer_begin))))
        return ReasoningBlock.CLOSED if is_closed else ReasoningBlock.NOT_BEGUN

    def reads(self, block: ReasoningBlock) -> bool:
        """Tell whether there is anything to read besides the answer."""
        return block is not ReasoningBlock.CLOSED or bool(self.answer_end)

    def parser(self, block: ReasoningBlock, answer: OutputParser) -> OutputParser:
        """Make a parser that tells reasoning and hands everything after it to the parser of the answer."""
        return ReasoningParser(self, block, answer) if self.reads(block) else answer

    def grammar(self, block: ReasoningBlock, mark: Mark) -> str:
        """Write rules in Lark: `reasoning` comes before the answer, newlines included, and `closing` after it.

        The model may leave out a block that has not begun, and the markers of the answer.
        """
        spell = partial(lark.spell, markers=self.markers, mark=mark)
        opening = f" ({spell(self.answer_begin)} /\\n?/)?" if self.answer_begin else ""
        closing = f" (/\\n?/ {spell(self.answer_end)})?" if self.answer_end else ""
        around = f"{opening}\nclosing:{closing}\n"
        if block is ReasoningBlock.CLOSED:
            return f"reasoning:{around}"
        rules = f"thinking: thought /\\n{{0,2}}/\n{text_up_to('thought', self.end, self.markers, mark)}"
        begun = "thinking" if block is ReasoningBlock.OPEN else f"(/\\n?/ {spell(self.begin)} thinking)?"
        return f"reasoning: {begun}{around}{rules}"


_TAGS = "<think>", "</think>"
THINK = ReasoningFormat(
    "think", "DeepSeek, Qwen 3, GLM, Kimi, MiniMax, Nemotron, Step, OLMo 3, Exaone 4, SmolLM 3", *_TAGS
)
MISTRAL = ReasoningFormat("mistral", "Magistral, Ministral 3, Mistral Small 4", "[THINK]", "[/THINK]")
SEED = ReasoningFormat("seed", "Seed-OSS", "<seed:think>", "</seed:think>", behind_begin="<seed:cot_budget_reflect>")
_RESPONSE = "<response>", "</response>"
GRANITE = ReasoningFormat("granite", "Granite 3.3", *_TAGS, "<response></response>", *_RESPONSE)
ERNIE = ReasoningFormat("ernie", "Ernie 4.5", *_TAGS, "<response>", *_RESPONSE)
HUNYUAN = ReasoningFormat("hunyuan", "Hunyuan", *_TAGS, "<answer>", "<answer>", "</answer>")
GRANITE_PHRASES = ReasoningFormat(
    "granite_phrases",
    "Granite 3.2",
    "Here is my thought process:",
    "Here is my response:",
    sign="'Here is my thought process:'",
)
_THINKING = "<|START_THINKING|>", "<|END_THINKING|>"
COHERE = ReasoningFormat(
    "cohere", "Command R7B, Command A", *_THINKING, "<|START_RESPONSE|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"
)
COHERE_TEXT = ReasoningFormat(
    "cohere_text", "Command A Plus", *_THINKING, "<|START_TEXT|>", "<|START_TEXT|>", "<|END_TEXT|>"
)
APERTUS = ReasoningFormat("apertus", "Apertus", "<|inner_prefix|>", "<|inner_suffix|>")
MINIMAX = ReasoningFormat("minimax", "MiniMax M3", "<mm:think>", "</mm:think>")
HY3 = ReasoningFormat("hy3", "Hy3", "<think:opensource>", "</think:opensource>", ":opensource")
GEMMA4 = ReasoningFormat("gemma4", "Gemma 4", "<|channel>thought", "<channel|>", tokens=("<|channel>", "<channel|>"))
KIMI_K3 = ReasoningFormat(
    "kimi_k3",
    "Kimi K3",
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    "<|open|>",
    "<|open|>response<|sep|>",
    "<|close|>response<|sep|>",
    tokens=("<|open|>", "<|close|>", "<|sep|>"),
)
SOLAR = ReasoningFormat(
    "solar",
    "Solar Open",
    "<|think|>",
    "<|end|><|begin|>assistant",
    "<|begin|>assistant<|think|>",
    "<|content|>",
    "<|end|>",
    tokens=("<|think|>", "<|end|>", "<|begin|>", "<|content|>"),
)
APRIEL = ReasoningFormat("apriel", "Apriel 1.5, 1.6", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
ALL = (
    MINIMAX,
    HY3,
    GEMMA4,
    KIMI_K3,
    SOLAR,
    APRIEL,
    GRANITE_PHRASES,
    GRANITE,
    COHERE_TEXT,
    COHERE,
    HUNYUAN,
    ERNIE,
    SEED,
    MISTRAL,
    APERTUS,
    THINK,
)
"""From the most specific to the least; the first whose sign occurs in a template is taken."""


def reasoning_format(template: str) -> ReasoningFormat | None:
    """The format that models of this chat template use; None: the template shows none."""
    return next((format for format in ALL if (format.sign or format.end) in template), None)


_SWITCHES: tuple[tuple[str, object, object], ...] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("reasoning", True, False),
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
            if tokens[at + 1][2] != "=":
                return True
            if tokens[at - 1][2] == "set":  # to its own value, perhaps: `set name = name | default(true)`
                end = next(end for end in range(at, len(tokens)) if tokens[end][1] == "block_end")
                return any(tokens[i][1:] == ("name", name) and tokens[i - 1][2] != "." for i in range(at + 2, end))
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

    def __init__(self, format: ReasoningFormat, block: ReasoningBlock, answer: OutputParser) -> None:
        self._format = format
        self._block = block
        self._answer = answer
        super().__init__()

    def _read(self) -> Steps[None]:
        format = self._format
        self._hold()
        if not (yield from self._read_reasoning()):
            return
        if format.answer_begin and (yield from self._next(format.answer_begin, skips_blanks=False)):
            self._release()
            yield from self._run(_NEWLINES)
        self._feed_answer(self._release())
        if format.answer_end:
            while (yield from self._until((f"\n{format.answer_end}", format.answer_end), self._feed_answer)):
                yield from self._run(_NEWLINES)
        else:
            yield from self._run(_ANYTHING, self._feed_answer)
        self._pieces += self._answer.finish()

    def _read_reasoning(self) -> Steps[bool]:
        """Read the block, if there is one; False: the output ended in it."""
        is_open = self._block is ReasoningBlock.OPEN
        if is_open or (self._block is ReasoningBlock.NOT_BEGUN and (yield from self._next(self._format.begin))):
            self._release()
            self.region = Kind.REASONING
            self._drop_blanks()  # newlines at the beginning are markup
            if (yield from self._until((self._format.end,), self._tell_reasoning)) is None:
                self._tell_blanks(Kind.REASONING)
                return False
            self._drop_blanks()
            yield from self._run(_NEWLINES)
        return True

    def _tell_reasoning(self, text: str) -> None:
        self._tell_trimmed(Kind.REASONING, text, "\n")

    def _feed_answer(self, text: str) -> None:
        if text:
            self._pieces += self._answer.feed(text)
            self.region = self._answer.region
