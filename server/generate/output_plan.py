"""Plans how an output is guided and parsed, and splits the text of each choice by that plan.

The answer to messages is reasoning, then calls or content. All constraints on it become one grammar for the engine. A
parser splits the text of each choice. Grammar and parser are made from the same formats, so they agree. An output that
continues a text prompt is content only.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.engine.wire.messages import FinishReason, Guidance, ReasoningBudget
from weft.server.errors import InvalidRequestError
from weft.server.formats.detection import OutputFormats
from weft.server.formats.grammar import literal
from weft.server.formats.parser import AnswerRules, Kind, OutputParser, Piece, ToolFormat, joined
from weft.server.formats.reasoning import ContentParser, ReasoningBlock, ReasoningFormat
from weft.server.generate import events as generated
from weft.server.generate.events import CallArguments, CallClosed, CallOpened, Event, Reasoning, Text
from weft.server.task.task import Chat, OutputWishes, Task, TextOptions
from weft.server.text.detokenizer import StopStrings
from weft.server.text.text_tokenizer import TextTokenizer

NUM_TAIL_TOKENS = 32
"""Number of tokens at a prompt's end that are searched for markers. No marker is longer."""
_NO_FORMATS = OutputFormats(None, None, "")


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How the output of a task is guided and parsed.

    Attributes:
        new_parser: Makes the parser of a choice; None if all text is content.
        kept_ids: Control tokens that the parser must see.
        counts_tokens: Usage counts reasoning tokens separately, so tokens are tracked.
    """

    guidance: Guidance
    new_parser: Callable[[], OutputParser] | None
    kept_ids: frozenset[int]
    counts_tokens: bool


def plan_output(task: Task, prompt_token_ids: list[int], prediction_token_ids: tuple[int, ...]) -> OutputPlan:
    """Choose the grammar and the parser.

    Args:
        prompt_token_ids: Its end shows whether the template has opened or closed the reasoning.
        prediction_token_ids: Text that the output will probably contain, as ids.

    Raises:
        InvalidRequestError: A beam search would need a grammar or a reasoning budget.
    """
    wishes, tokenizer = task.wishes, task.model.tokenizer
    formats = task.model.formats if isinstance(task.input, Chat) else _NO_FORMATS
    use, reasoning = wishes.use, formats.reasoning
    block = ReasoningBlock.CLOSED
    if reasoning:
        block = reasoning.block(tokenizer.decode(prompt_token_ids[-NUM_TAIL_TOKENS:], skip_special_tokens=False))
    tools = formats.tools if use is not None or formats.tools_read_all else None

    def new_parser() -> OutputParser:
        answer = tools.parser(use.tools if use else ()) if tools else ContentParser()
        return reasoning.parser(block, answer) if reasoning else answer

    markers = (*(reasoning.markers if reasoning else ()), *(tools.markers if tools else ()))
    guidance = Guidance(
        grammar=_grammar(tokenizer, reasoning, block, tools, wishes) if use or wishes.structure else None,
        prediction_token_ids=prediction_token_ids,
        reasoning_budget=_budget(formats, block, wishes.thinking.max_tokens),
    )
    # Beam search uses the model's own probabilities only.
    if task.beams is not None and (guidance.grammar is not None or guidance.reasoning_budget is not None):
        raise InvalidRequestError(
            "use_beam_search can follow neither a grammar nor a budget for reasoning", param="use_beam_search"
        )
    # After closed reasoning all text is content. But only a parser can tell what tokens without text belong to.
    is_parsed = tools or (reasoning and (reasoning.reads(block) or task.text.tracks_tokens))
    return OutputPlan(
        guidance=guidance,
        new_parser=new_parser if is_parsed else None,
        kept_ids=frozenset(i for marker in markers if (i := tokenizer.added_id(marker)) is not None),
        counts_tokens=block is not ReasoningBlock.CLOSED or formats.tools_read_all,
    )


def _grammar(
    tokenizer: TextTokenizer,
    reasoning: ReasoningFormat | None,
    block: ReasoningBlock,
    tools: ToolFormat | None,
    wishes: OutputWishes,
) -> str:
    """The whole grammar as `llguidance` reads it: a frame in Lark, and the caller's own grammar beside it."""
    use, structure = wishes.use, wishes.structure

    def mark(text: str) -> str:
        token_id = tokenizer.added_id(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    if structure and not (reasoning or tools):
        return json.dumps({"grammars": [structure.grammar]})
    rules = ["start: reasoning answer closing" if reasoning else "start: answer"]
    if reasoning:
        rules.append(reasoning.grammar(block, mark))
    if tools:
        content = "content" if structure else None
        wanted = AnswerRules((), mark, content)
        if use:
            wanted = AnswerRules(use.tools, mark, content, use.is_required, use.allows_many)
        rules.append(tools.grammar(wanted))
    else:
        rules.append("answer: content")
    grammars = [{"name": "output", "lark_grammar": "\n".join(rules)}]
    if structure:
        grammars[0]["lark_grammar"] += "\ncontent: @structure"
        grammars.append({"name": "structure", **structure.grammar})
    return json.dumps({"grammars": grammars})


def _budget(formats: OutputFormats, block: ReasoningBlock, max_tokens: int | None) -> ReasoningBudget | None:
    if formats.reasoning_ids is None or block is ReasoningBlock.CLOSED or max_tokens is None:
        return None
    begin_id, end_id = formats.reasoning_ids
    return ReasoningBudget(max_tokens, end_id, begin_id if block is ReasoningBlock.NOT_BEGUN else None)


class _Read(NamedTuple):
    """The parser's result for a token's text; `token` is None for text of earlier tokens.

    Attributes:
        regions: The regions before and after the text.
    """

    token: generated.Token | None
    regions: set[Kind]
    pieces: list[Piece]


class ParsedChoice:
    """Splits the text of one choice into reasoning, content and calls, each with its tokens. Only `feed` mutates it.

    If tokens are tracked, the parser gets the text token by token. So the kind of a token does not depend on how the
    engine's outputs were merged. Stop strings are searched in content only, not in reasoning or calls. While some
    content may become a stop string, everything after it is held back too.

    Attributes:
        num_tokens: Tracked tokens so far, up to the match of a stop string.
        num_reasoning_tokens: Tracked tokens of reasoning, including the markers and newlines around it.
        has_matched: A stop string matched, so the choice has ended.
    """

    def __init__(self, parser: OutputParser, options: TextOptions, *, is_whole: bool = False) -> None:
        """Start with nothing read. If there are stop strings, tokens must be tracked.

        Args:
            is_whole: The answer is not streamed. All text may then be parsed once, at the end, which is faster.
        """
        self._parser = parser
        self._options = options
        self._stops = StopStrings(options.stops, options.include_stop) if options.stops else None
        self._waits_for_end = is_whole and self._stops is None
        self._waiting: tuple[list[str], list[generated.Token]] = [], []
        self._num_fed = 0
        self._unsure: list[_Read] = []  # held back: their content may become a stop string
        self._num_held = self._num_let_go = 0  # characters of that content: may be a stop string; cannot be
        self._is_cut = False  # a stop string cut the content
        self._undecided: list[generated.Token] = []  # tokens whose text the parser still holds
        self._call: tuple[str, list[str]] | None = None  # the open call; None: no call is open
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.has_matched = False

    def feed(self, text: str, tokens: list[generated.Token], end: generated.End | None) -> list[Event]:
        """Take the choice's new text; return the events that are certain now. Adjacent ones of a kind are joined."""
        if self._waits_for_end:
            texts, all_tokens = self._waiting
            texts.append(text)
            all_tokens += tokens
            if end is None:
                return []
            text, tokens = "".join(texts), all_tokens
        num_sure = 0
        for token, slice_ in self._slices(text, tokens):
            before = self._parser.region
            pieces = self._parser.feed(slice_) if slice_ else []
            self._unsure.append(_Read(token, {before, self._parser.region}, pieces))
            self.num_tokens += token is not None
            if self._stops is not None:
                self._search(self._stops, pieces, is_passed=self.num_tokens <= self._options.min_tokens)
                if self.has_matched:
                    break
            if not self._num_held:
                num_sure = len(self._unsure)
        if end is None and not self.has_matched:
            return self._tell(num_sure)
        end = self._finish(end)
        return [*self._tell(len(self._unsure)), *self._close_call(), end]

    def _search(self, stops: StopStrings, pieces: Sequence[Piece], *, is_passed: bool) -> None:
        """Search content for stop strings. If `is_passed`, skip the search."""
        for piece in pieces:
            if piece.kind is Kind.CONTENT and stops.matched is None:
                let_go = piece.text if is_passed else stops.feed(piece.text)
                self._num_let_go += len(let_go)
                self._num_held += len(piece.text) - len(let_go)
        self.has_matched = stops.matched is not None

    def _finish(self, end: generated.End | None) -> generated.End:
        """Flush the parser, and return how the choice ended. `end` is None if a stop string has matched."""
        is_cut_call = self._parser.region is Kind.CALL and end is not None and end.reason is FinishReason.LENGTH
        rest = self._parser.finish()
        if self._stops is not None:
            self._search(self._stops, rest, is_passed=False)
            if self.has_matched:
                end = generated.End(FinishReason.STOP, self._stops.matched)
            else:
                self._num_let_go += self._num_held
        if is_cut_call and not self.has_matched:  # markup of a cut call is not content
            rest = [piece for piece in rest if piece.kind is not Kind.CONTENT]
        self._unsure.append(_Read(None, {self._parser.region}, rest))
        assert end is not None
        return end

    def _tell(self, num_reads: int) -> list[Event]:
        """The events of the first `num_reads` reads, which are now certain."""
        reads, self._unsure = self._unsure[:num_reads], self._unsure[num_reads:]
        pieces: list[Piece] = []
        tokens: list[generated.Token] = []
        for token, regions, new in reads:
            kept = new if self._stops is None else self._kept(new)
            pieces += kept
            if token is not None:
                self._undecided.append(token)
            if self._undecided:
                tokens += self._decide(regions, kept)
        events: list[Event] = []
        if self._options.tells_ids and (ids := [read.token.token_id for read in reads if read.token is not None]):
            events.append(generated.TokenIds(ids))
        for kind, text in joined(pieces):
            if self._call is not None and kind is not Kind.ARGUMENTS:
                events += self._close_call()
            match kind:
                case Kind.CONTENT:
                    events.append(Text(text, tokens))
                    tokens = []
                case Kind.REASONING:
                    events.append(Reasoning(text))
                case Kind.CALL:
                    self._call = text, []
                    events.append(CallOpened(text))
                case Kind.ARGUMENTS:
                    assert self._call is not None, "arguments are those of a call"
                    self._call[1].append(text)
                    events.append(CallArguments(text))
        return events

    def _close_call(self) -> list[CallClosed]:
        """The end of the open call, if there is one."""
        if self._call is None:
            return []
        (name, arguments), self._call = self._call, None
        return [CallClosed(name, "".join(arguments))]

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        """Drop everything after the content that the stop strings released."""
        kept: list[Piece] = []
        for piece in pieces:
            if piece.kind is Kind.CONTENT:
                text = piece.text[: self._num_let_go]
                self._num_let_go -= len(text)
                self._is_cut = self._is_cut or len(text) < len(piece.text)
                kept += [Piece(Kind.CONTENT, text)] if text else []
            elif not self._is_cut:
                kept.append(piece)
        return kept

    def _decide(self, regions: set[Kind], pieces: Sequence[Piece]) -> list[generated.Token]:
        """Count the undecided tokens as reasoning or content once that is certain; return those of content."""
        is_content = any(piece.kind is Kind.CONTENT for piece in pieces)
        if regions == {Kind.CONTENT} and not is_content:
            return []
        decided, self._undecided = self._undecided, []
        if is_content:
            return decided
        if Kind.REASONING in regions:
            self.num_reasoning_tokens += len(decided)
        return []

    def _slices(self, text: str, tokens: Sequence[generated.Token]) -> Iterator[tuple[generated.Token | None, str]]:
        """Cut the text where tokens begin. Text before the first token belongs to earlier tokens."""
        starts = [max(0, token.start - self._num_fed) for token in tokens]
        self._num_fed += len(text)
        ends = [*starts, len(text)]
        if ends[0]:
            yield None, text[: ends[0]]
        for token, start, end in zip(tokens, starts, ends[1:], strict=True):
            yield token, text[start:end]
