"""How an output is guided and read: the one place where reasoning, tools and structure meet.

An output is reasoning, then calls or content. What of it is not free text becomes one grammar for the engine, and a
parser takes each choice's text apart again; both come from the same formats, so they agree.
"""

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from weft.engine.shared.messages import Guidance, ReasoningBudget, RejectReason
from weft.server.errors import GrammarError, JsonSchemaError, UnsupportedParameterError
from weft.server.formats import lark
from weft.server.formats.detection import OutputFormats
from weft.server.formats.parser import AnswerRules, OutputParser, ToolFormat
from weft.server.formats.reasoning import Block, ContentParser, ReasoningFormat
from weft.server.generate.engine_client import RequestRejectedError
from weft.server.http.context import TextTokenizer
from weft.server.render.chat import Reading
from weft.server.request.structured_output import Structure, structure_of
from weft.server.request.thinking import Thinking, read_thinking
from weft.server.request.tool_use import ToolUse, tool_use
from weft.server.schemas.chat_completions import ChatCompletionBody

NUM_TAIL_TOKENS = 32
"""Of a prompt's end: no marker is longer."""


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What follows from a request for its output.

    Attributes:
        reading: For the renderer; None when all text is content.
        kept_ids: Control tokens that the parser has to see.
        counts_tokens: Usage tells tokens apart by what they were spent on.
    """

    guidance: Guidance
    reading: Reading | None
    kept_ids: frozenset[int]
    counts_tokens: bool


@dataclass(frozen=True, slots=True)
class OutputWishes:
    """What a chat body says about its output."""

    use: ToolUse | None
    structure: Structure | None
    thinking: Thinking

    @property
    def variables(self) -> dict[str, object]:
        """What the chat template has to know of it."""
        return {**self.thinking.template_kwargs, **({"tools": self.use.shown} if self.use else {})}


def read_wishes(body: ChatCompletionBody, formats: OutputFormats) -> OutputWishes:
    """Read the fields about tools, structure and reasoning.

    Raises:
        InvalidRequestError: One of them is wrong.
        UnsupportedParameterError: There are tools, and the model has no way to be shown them.
    """
    use = tool_use(body)
    if use is not None and formats.tools is None:
        raise UnsupportedParameterError(
            f"{use.param} cannot be used: the chat template of this model shows no tools", param=use.param
        )
    return OutputWishes(use, structure_of(body), read_thinking(body, formats))


def plan_output(
    wishes: OutputWishes,
    formats: OutputFormats,
    tokenizer: TextTokenizer,
    prompt_token_ids: list[int],
    prediction_token_ids: tuple[int, ...],
) -> OutputPlan:
    """Decide on grammar and parser.

    Args:
        prompt_token_ids: Templates open or close the reasoning at the end of the prompt.
        prediction_token_ids: What the output will probably hold.
    """
    use, structure, reasoning = wishes.use, wishes.structure, formats.reasoning
    block = Block.CLOSED
    if reasoning:
        block = reasoning.block(tokenizer.decode(prompt_token_ids[-NUM_TAIL_TOKENS:], skip_special_tokens=False))
    tools = formats.tools if use is not None or formats.tools_read_all else None

    def new_parser() -> OutputParser:
        answer = tools.parser(use.tools if use else ()) if tools else ContentParser()
        return reasoning.parser(block, answer) if reasoning else answer

    markers = (*(reasoning.markers if reasoning else ()), *(tools.markers if tools else ()))
    guidance = Guidance(
        grammar=_grammar(tokenizer, reasoning, block, tools, use, structure) if use or structure else None,
        prediction_token_ids=prediction_token_ids,
        reasoning_budget=_budget(formats, block, wishes.thinking.max_tokens),
    )
    return OutputPlan(
        guidance=guidance,
        reading=Reading(new_parser, use, wishes.thinking.is_shown) if tools or reasoning else None,
        kept_ids=frozenset(i for marker in markers if (i := tokenizer.added_id(marker)) is not None),
        counts_tokens=block is not Block.CLOSED or formats.tools_read_all,
    )


def structured_guidance(structure: Structure | None) -> Guidance:
    """The guidance of an output that is nothing but the structure."""
    return Guidance(json.dumps({"grammars": [structure.grammar]})) if structure else Guidance()


def _grammar(
    tokenizer: TextTokenizer,
    reasoning: ReasoningFormat | None,
    block: Block,
    tools: ToolFormat | None,
    use: ToolUse | None,
    structure: Structure | None,
) -> str:
    """Everything as `llguidance` reads it: Lark for the frame, the caller's own grammar beside it."""

    def mark(text: str) -> str:
        token_id = tokenizer.added_id(text)
        return lark.literal(text) if token_id is None else f"<[{token_id}]>"

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


def _budget(formats: OutputFormats, block: Block, max_tokens: int | None) -> ReasoningBudget | None:
    if formats.reasoning_ids is None or block is Block.CLOSED or max_tokens is None:
        return None
    begin_id, end_id = formats.reasoning_ids
    return ReasoningBudget(max_tokens, end_id, begin_id if block is Block.NOT_BEGUN else None)


@contextmanager
def naming_the_grammar(structure: Structure | None, use: ToolUse | None = None) -> Generator[None, None, None]:
    """Say of a grammar that the engine does not take from which field it came."""
    try:
        yield
    except RequestRejectedError as error:
        if error.reason is not RejectReason.GRAMMAR:
            raise
        is_schema = structure.is_schema if structure else use is not None
        param = structure.param if structure else use.param if use else None
        kind = JsonSchemaError if is_schema else GrammarError
        raise kind(f"{param}: {error.message}", param=param) from None
