"""Tools of whose arguments nothing is enforced: a call may hold any, in every kind of format."""

import json
from functools import cache
from pathlib import Path

import llguidance
import pytest
import tokenizers

from weft.server.formats.harmony import HARMONY
from weft.server.formats.json_calls import HERMES
from weft.server.formats.parser import AnswerRules, Kind, Tool, ToolFormat
from weft.server.formats.pythonic_calls import LFM2, PYTHONIC
from weft.server.formats.xml_families import GLM, MINIMAX_M2, QWEN3_CODER, SEED
from weft.server.json_schema.keywords import FREE_OBJECT

DEMO = Path(__file__).parents[3] / "server" / "demo_model" / "tokenizer.json"
TOOLS = [Tool("free", FREE_OBJECT), Tool("other", FREE_OBJECT), Tool("none", {"type": "object"})]
JSON = '{"a": 1, "b_2": "x < y"}'
PYTHON = 'a=1, b_2="x < y"'
LINES = "<parameter=a>\n1\n</parameter>\n<parameter=b_2>\nx < y\n</parameter>\n"
TAGS = "<parameter=a>1</parameter>\n<parameter=b_2>x < y</parameter>\n"
PAIRS = "".join(
    f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in (("a", 1), ("b_2", "x < y"))
)
NAMED = '<parameter name="a">1</parameter>\n<parameter name="b_2">x < y</parameter>\n'
INVOKED = f'<minimax:tool_call>\n<invoke name="NAME">\n{NAMED}</invoke>\n</minimax:tool_call>'
CALLS: list[tuple[ToolFormat, str, str]] = [  # a format, a call of two arguments in it, these arguments
    (HERMES, f'<tool_call>\n{{"name": "NAME", "arguments": {JSON}}}\n</tool_call>', JSON),
    (HARMONY, f"<|channel|>commentary to=functions.NAME<|message|>{JSON}", JSON),
    (PYTHONIC, f"<|python_start|>[NAME({PYTHON})]<|python_end|>", PYTHON),
    (LFM2, f"<|tool_call_start|>[NAME({PYTHON})]<|tool_call_end|>", PYTHON),
    (QWEN3_CODER, f"<tool_call>\n<function=NAME>\n{LINES}</function>\n</tool_call>", LINES),
    (SEED, f"<seed:tool_call>\n<function=NAME>\n{TAGS}</function>\n</seed:tool_call>", TAGS),
    (GLM, f"<tool_call>NAME\n{PAIRS}</tool_call>", PAIRS),
    (MINIMAX_M2, INVOKED, NAMED),
]
each_format = pytest.mark.parametrize(("format", "call", "arguments"), CALLS, ids=[format.name for format, *_ in CALLS])


@cache
def backend() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEMO))


@cache
def vocabulary() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(backend().to_str())


def mark(marker: str) -> str:
    token_id = backend().token_to_id(marker)
    return json.dumps(marker) if token_id is None else f"<[{token_id}]>"


def accepts(format: ToolFormat, text: str) -> bool:
    grammar = f"start: answer\n{format.grammar(AnswerRules(TOOLS, mark, is_required=True))}"
    matcher = llguidance.LLMatcher(vocabulary(), grammar)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = backend().encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@each_format
def test_any_arguments_are_taken_and_read(format: ToolFormat, call: str, arguments: str) -> None:
    for name in ("free", "other"):
        text = call.replace("NAME", name)
        assert accepts(format, text)
        parser = format.parser(TOOLS)
        pieces = [*parser.feed(text), *parser.finish()]
        assert [piece.text for piece in pieces if piece.kind is Kind.CALL] == [name]
        told = "".join(piece.text for piece in pieces if piece.kind is Kind.ARGUMENTS)
        assert json.loads(told) == {"a": 1, "b_2": "x < y"}


@each_format
def test_no_arguments_are_taken_too(format: ToolFormat, call: str, arguments: str) -> None:
    nothing = "{}" if arguments.startswith("{") else ""
    for name in ("free", "none"):
        assert accepts(format, call.replace("NAME", name).replace(arguments, nothing))
    assert not accepts(format, call.replace("NAME", "none"))


def test_equal_rules_of_arguments_are_written_once() -> None:
    """With a thousand tools they would leave no room for their names."""
    rules = HERMES.grammar(AnswerRules(TOOLS, mark)).splitlines()
    assert [rule.split(":")[0] for rule in rules if rule.startswith("arguments_")] == ["arguments_0", "arguments_2"]
