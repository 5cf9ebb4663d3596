"""Plans an output: one grammar and one parser for reasoning, tools and structure.

The answer to messages is reasoning, then calls or content. All constraints on it become one grammar for the engine. A
parser splits the text of each choice. Grammar and parser are made from the same formats, so they agree. An output that
continues a text prompt is content only.
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
from weft.server.task.task import Chat, OutputWishes, Task
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
        return lark.literal(text) if token_id is None else f"<[{token_id}]>"

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


@contextmanager
def naming_the_grammar(wishes: OutputWishes) -> Generator[None, None, None]:
    """If the engine rejects the grammar, name the field that asked for it."""
    try:
        yield
    except GrammarError as error:
        structure, use = wishes.structure, wishes.use
        is_schema = structure.is_schema if structure else use is not None
        param = structure.param if structure else use.param if use else None
        kind = JsonSchemaError if is_schema else GrammarError
        raise kind(f"{param}: {error.message}", param=param) from None
