"""How an output is guided and read: the one place where reasoning, tools and structure meet.

The answer to messages is reasoning, then calls or content. What of it is not free text becomes one grammar for the
engine, and a parser takes each choice's text apart again; both come from the same formats, so they agree. What
continues a text is content alone.
"""

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from weft.engine.shared.messages import Guidance, ReasoningBudget
from weft.server.errors import GrammarError, InvalidRequestError, JsonSchemaError
from weft.server.formats import lark
from weft.server.formats.detection import OutputFormats
from weft.server.formats.parser import AnswerRules, OutputParser, ToolFormat
from weft.server.formats.reasoning import ContentParser, ReasoningBlock, ReasoningFormat
from weft.server.request.task import Chat, OutputWishes, Task
from weft.server.text.text_tokenizer import TextTokenizer

NUM_TAIL_TOKENS = 32
"""Of a prompt's end: no marker is longer."""
_NO_FORMATS = OutputFormats(None, None, "")


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What follows from a task for its output.

    Attributes:
        new_parser: For each choice; None when all text is content.
        kept_ids: Control tokens that the parser has to see.
        counts_tokens: Usage tells tokens apart by what they were spent on.
    """

    guidance: Guidance
    new_parser: Callable[[], OutputParser] | None
    kept_ids: frozenset[int]
    counts_tokens: bool


def plan_output(task: Task, prompt_token_ids: list[int], prediction_token_ids: tuple[int, ...]) -> OutputPlan:
    """Decide on grammar and parser.

    Args:
        prompt_token_ids: Templates open or close the reasoning at the end of the prompt.
        prediction_token_ids: What the output will probably hold.

    Raises:
        InvalidRequestError: A beam search can follow neither a grammar nor a budget for reasoning.
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
    # No probability but the model's own decides what a search finds.
    if task.beams is not None and (guidance.grammar is not None or guidance.reasoning_budget is not None):
        raise InvalidRequestError(
            "use_beam_search can follow neither a grammar nor a budget for reasoning", param="use_beam_search"
        )
    # Behind closed reasoning all is content, but of tokens without text only a parser says what they belong to.
    is_parsed = tools or (reasoning and (block is not ReasoningBlock.CLOSED or task.text.tracks_tokens))
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
    """Everything as `llguidance` reads it: Lark for the frame, the caller's own grammar beside it."""
    use, structure = wishes.use, wishes.structure

    def mark(text: str) -> str:
        token_id = tokenizer.added_id(text)
        return lark.literal(text) if token_id is None else f"<[{token_id}]>"

    if structure and not (reasoning or tools):
        return json.dumps({"grammars": [structure.grammar]})
    rules = [f"start: {'reasoning ' if reasoning else ''}answer"]
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


@contextmanager
def naming_the_grammar(wishes: OutputWishes) -> Generator[None, None, None]:
    """Say of a grammar that the engine does not take from which field it came."""
    try:
        yield
    except GrammarError as error:
        structure, use = wishes.structure, wishes.use
        is_schema = structure.is_schema if structure else use is not None
        param = structure.param if structure else use.param if use else None
        kind = JsonSchemaError if is_schema else GrammarError
        raise kind(f"{param}: {error.message}", param=param) from None
