"""The base of all formats: what a parser and a tool format are, and the scanner that most parsers build on.

A parser takes text in pieces of any size and tells what is certain. Its results depend on the text alone, never on how
it was cut. Streamed and plain answers go through the same parser. Parsers know no ids, no JSON of the wire and no
clock.
"""

import enum
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from json.encoder import encode_basestring
from typing import Any, NamedTuple, Protocol, TypeVar

from typing_extensions import override


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
    """A function that the model may call. If it is strict, a part of its schema that cannot be enforced is an error.

    Attributes:
        parameters: The schema that is enforced: that of the declaration if it is strict, else what is left of it.
        at: Path of the schema in the body.
    """

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False
    at: str = ""


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
        reads_all: Its parser reads every output, also where there are no tools.
    """

    name: str
    models: str
    markers: tuple[str, ...]
    present: tuple[str, ...]
    absent: tuple[str, ...] = ()
    call_id: str = ""
    call_id_pattern: str = ""
    reads_all: bool = False

    def is_used_by(self, template: str) -> bool:
        """Tell from the source of its chat template whether a model writes calls in this format."""
        has_other = any(re.search(sign, template) for sign in self.absent)
        return not has_other and all(re.search(sign, template) for sign in self.present)

    @property
    def call_texts(self) -> Sequence[str]:
        """The texts around calls, for a template that shows no calls (see `TextTokenizer`); none if they vary."""
        return ()

    @abstractmethod
    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        """Make a parser for an output that may call these tools; everything that is not a call is content."""

    @abstractmethod
    def grammar(self, wanted: AnswerRules) -> str:
        """Write rules for `llguidance` in Lark; the rule `answer` is the whole output after the reasoning.

        Once a call has opened, the output can only be one of these tools with arguments of its schema.
        """


_SURROGATE = re.compile("[\ud800-\udfff]")


def json_text(value: Any) -> str:
    """Write JSON that UTF-8 can carry: a lone surrogate stays an escape.

    Raises:
        ValueError: The value holds a number that JSON does not have.
    """
    return escape_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def escape_surrogates(text: str) -> str:
    """Escape the characters of JSON strings that UTF-8 cannot hold."""
    return text if text.isascii() else _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Yields where it has to wait for text; returns a value at the end."""

_BLANKS = re.compile(r"\s*")
_SCALAR = re.compile(r"[0-9+\-.eEtrufalsn]*")
_BETWEEN = re.compile(r"[ \t\r\n,:0-9+\-.eEtrufalsn]*")


@lru_cache(maxsize=256)
def _search(ends: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """Patterns that find the first of these texts, and the start of one at the end of a text; how long that can be."""
    starts = {re.escape(end[:size]) for end in ends for size in range(1, len(end))}
    return re.compile("|".join(map(re.escape, ends))), re.compile(f"(?:{'|'.join(starts)})\\Z"), max(map(len, ends)) - 1


@lru_cache(maxsize=256)
def _choice(options: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str], int]:
    """A pattern for the longest of these texts; all their incomplete beginnings; the longest length."""
    starts = frozenset(option[:size] for option in options for size in range(len(option)))
    whole = "|".join(map(re.escape, sorted(options, key=len, reverse=True))) or "(?!)"
    return re.compile(whole), starts, max(map(len, options), default=0)


class Scanner(OutputParser):
    """The base of parsers: reads text that is still arriving as if the whole of it were there.

    A parser is one generator. It waits (`yield`) where the text so far does not decide. The scanner owns the text that
    was fed and is not yet read, which is bounded: it may still become a marker, a header or a word. What is read from
    the opening of a call until the call is certain is held as well. If no call follows, it is given back as content,
    exactly as written. White space at the end of content is held until it is known that no call follows; white space
    after a call is dropped. Only `feed` and `finish` mutate it.
    """

    def __init__(self) -> None:
        self.region = Kind.CONTENT
        self._text = ""
        self._at = 0  # the text before it has been read
        self._mark: int | None = None  # the text that is read from here on is held; None: nothing is
        self._held: list[str] = []  # held parts of earlier texts
        self._is_over = False
        self._pieces: list[Piece] = []
        self._blanks: list[str] = []  # white space after what was told, not told yet
        self._drops_blanks = False  # white space that comes next is not part of the text
        self._steps = self._read()
        next(self._steps)

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Read the whole output; return only when it is over."""

    @override
    def feed(self, text: str) -> list[Piece]:
        if self._mark is not None:
            self._held.append(self._text[self._mark : self._at])
            self._mark = 0
        self._text, self._at = self._text[self._at :] + text, 0
        next(self._steps)
        return self._take_pieces()

    @override
    def finish(self) -> list[Piece]:
        self._is_over = True
        next(self._steps, None)
        self._tell_blanks(Kind.CONTENT)
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        told, self._pieces = self._pieces, []
        return joined(told) if len(told) > 1 else told

    def _tell(self, kind: Kind, text: str) -> None:
        if text:
            self._pieces.append(Piece(kind, text))

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._pieces.append(Piece(Kind.ARGUMENTS, text))

    def _tell_string(self, text: str) -> None:
        """Tell a part of a JSON string, without its quotes."""
        self._tell(Kind.ARGUMENTS, escape_surrogates(encode_basestring(text))[1:-1])

    def _tell_content(self, text: str) -> None:
        """Tell content; white space right after a call is not part of it."""
        if text.strip():
            self.region = Kind.CONTENT
        self._tell_trimmed(Kind.CONTENT, text)

    def _tell_trimmed(self, kind: Kind, text: str, blank: str | None = None) -> None:
        """Tell text; hold the `blank` characters (None: white space) at its end."""
        seen = text.rstrip(blank)
        if seen:
            self._tell_blanks(kind)
            self._tell(kind, seen.lstrip(blank) if self._drops_blanks else seen)
            self._drops_blanks = False
        if len(seen) < len(text) and not self._drops_blanks:
            self._blanks.append(text[len(seen) :])

    def _tell_blanks(self, kind: Kind) -> None:
        self._tell(kind, "".join(self._blanks))
        self._blanks.clear()

    def _drop_blanks(self) -> None:
        """Drop the white space around markup that was just read."""
        self._blanks.clear()
        self._drops_blanks = True

    def _begin_call(self, name: str, arguments: str = "{") -> None:
        """Tell that this tool is called; its opening can no longer be given back."""
        self._release()
        self._drop_blanks()
        self.region = Kind.CALL
        self._tell(Kind.CALL, name)
        self._tell_arguments(arguments)

    def _hold(self, opening: str = "") -> None:
        """Hold what is read from `opening` on, which was just read; forget what was held before."""
        self._held.clear()
        self._mark = self._at - len(opening)

    def _release(self) -> str:
        """Stop holding; return what was held."""
        text = self._text[self._mark : self._at] if self._mark is not None else ""
        held = "".join([*self._held, text])
        self._held.clear()
        self._mark = None
        return held

    def _give_back(self) -> None:
        """Tell as content what was held: it is not a call."""
        self._tell_content(self._release())

    def _read_content(self, openings: tuple[str, ...], read_call: Callable[[str], Steps[bool]]) -> Steps[None]:
        """Read content and calls to the end; `read_call` reads what follows an opening; False: it is no call."""
        while (opening := (yield from self._until(openings, self._tell_content))) is not None:
            self._hold(opening)
            self.region = Kind.CALL
            if not (yield from read_call(opening)):
                self._give_back()
            elif self._is_over:
                self._at = len(self._text)  # markup of the call that is cut off
            self.region = Kind.CONTENT

    def _until(self, ends: tuple[str, ...], sink: Callable[[str], object]) -> Steps[str | None]:
        """Hand the text before the first of `ends` to `sink` as soon as it is certain; step over that end.

        Args:
            ends: No end is the beginning of another.
            sink: Gets the text in pieces that are not empty.

        Returns:
            The end that was found; None: the output ended first.
        """
        whole, start, longest = _search(ends)
        while True:
            text, at = self._text, self._at
            found = whole.search(text, at)
            if found is not None:
                stop, self._at = found.span()
            elif self._is_over:
                stop = self._at = len(text)
            else:
                held = start.search(text, max(at, len(text) - longest))
                stop = self._at = held.start() if held else len(text)
            if at < stop:
                sink(text[at:stop])
            if found is not None or self._is_over:
                return found and found[0]
            yield

    def _next(self, *options: str, skips_blanks: bool = True) -> Steps[str | None]:
        """Step over white space, if asked, and the longest of `options` that comes next.

        Returns:
            The option; None: no option comes next, and only white space has been read.
        """
        whole, starts, longest = _choice(options)
        while True:
            if skips_blanks:
                self._at = _BLANKS.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches always
            if self._is_over or self._text[self._at : self._at + longest] not in starts:
                found = whole.match(self._text, self._at)
                self._at = found.end() if found else self._at
                return found and found[0]
            yield

    def _peek(self) -> Steps[str]:
        """Step over white space; return the next character without stepping over it; "": the output has ended."""
        yield from self._run(_BLANKS)
        return self._text[self._at : self._at + 1]

    def _run(self, characters: re.Pattern[str], sink: Callable[[str], object] | None = None) -> Steps[bool]:
        """Step over all text that matches `characters`, as it comes; False: there was none."""
        has_any = False
        while True:
            start, self._at = self._at, characters.match(self._text, self._at).end()  # type: ignore[union-attr]
            if start < self._at:
                has_any = True
                if sink is not None:
                    sink(self._text[start : self._at])
            if self._is_over or self._at < len(self._text):
                return has_any
            yield

    def _json_string(self, sink: Callable[[str], object]) -> Steps[bool]:
        """Hand the rest of a JSON string and its quote to `sink`; False: the output ended first."""
        while (end := (yield from self._until(('"', "\\\\", '\\"'), sink))) is not None:
            sink(end)
            if end == '"':
                return True
        return False

    def _json(self, sink: Callable[[str], object]) -> Steps[bool]:
        """Hand one JSON value to `sink` while it comes; False: it breaks off, or a character comes that cannot.

        Follows strings and nesting, and stops at characters that cannot stand between strings, so that markup after a
        value that lacks a bracket is seen. Checks no more: arguments are passed on as the model writes them.
        """
        depth = 0
        while True:
            if (yield from self._run(_BETWEEN if depth else _SCALAR, sink)) and not depth:
                return self._at < len(self._text)
            sign = yield from self._next('"', "{", "[", *(("}", "]") if depth else ()), skips_blanks=False)
            if sign is None:
                return False
            sink(sign)
            if sign != '"':
                depth += 1 if sign in "{[" else -1
            elif not (yield from self._json_string(sink)):
                return False
            if not depth:
                return True
