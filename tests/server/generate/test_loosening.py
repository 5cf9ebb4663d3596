"""The engine's refusal of a grammar, with the grammar compiler's own messages and a fake answer."""

import asyncio
import json
from typing import Any

import pytest
from llguidance import LLMatcher

from weft.engine.guidance.meeting import check_meeting
from weft.engine.wire.messages import Guidance
from weft.server.errors import GrammarError, JsonSchemaError
from weft.server.formats.harmony import HARMONY
from weft.server.formats.json_calls import HERMES
from weft.server.formats.parser import AnswerRules, Tool, ToolFormat
from weft.server.formats.pythonic_calls import PYTHONIC
from weft.server.formats.xml_families import QWEN3_CODER
from weft.server.generate.loosening import MAX_STEPS, open_loosening
from weft.server.json_schema.keywords import FREE_OBJECT
from weft.server.task.structured_output import json_structure
from weft.server.task.task import OutputWishes
from weft.server.task.tool_use import ToolUse

TEXT = {"type": "string"}
GOOD = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 3}}, "required": ["a"]}
# No value is left, which only the compiler finds out.
EMPTY: dict[str, Any] = {"allOf": [{"type": "integer"}, {"type": "null"}]}
BAD = {"type": "object", "properties": {"a": TEXT, "b": EMPTY}, "required": ["b"]}
BAD_INSIDE = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": EMPTY}, "required": ["b"]}},
              "required": ["a"]}  # fmt: skip


def meeting_fault(text: str) -> str:
    """What the engine refuses before it compiles."""
    try:
        for grammar in json.loads(text)["grammars"]:
            check_meeting(grammar)
    except ValueError as error:
        return str(error)
    return ""


class FakeAnswer:
    """Compiles the grammar when it is opened."""

    def __init__(self, guidance: Guidance, refuses_all: bool = False) -> None:
        self.guidance = guidance
        self.lost: list[str] = []
        self.num_opened = 0
        self._refuses_all = refuses_all

    def guide(self, guidance: Guidance) -> None:
        self.guidance = guidance

    async def open(self, client: Any) -> None:
        self.num_opened += 1
        text = self.guidance.grammar or ""
        fault = "too complex" if self._refuses_all else meeting_fault(text) or LLMatcher.validate_grammar(text)
        if fault:
            raise GrammarError(f"the grammar cannot be used: {fault}")


def opened(wishes: OutputWishes, format: ToolFormat = HERMES, **how: Any) -> tuple[FakeAnswer, OutputWishes]:
    made = [wishes]

    def guidance(wishes: OutputWishes) -> Guidance:
        grammars: list[dict[str, Any]] = []
        if wishes.use:
            rules = format.grammar(AnswerRules(wishes.use.tools, json.dumps, is_required=True))
            grammars.append({"name": "output", "lark_grammar": f"start: answer\n{rules}"})
        if wishes.structure:
            grammars.append({"name": "structure", **wishes.structure.grammar})
        return Guidance(json.dumps({"grammars": grammars}))

    async def guide(wishes: OutputWishes) -> Guidance:
        made.append(wishes)
        return guidance(wishes)

    answer: Any = FakeAnswer(guidance(wishes), **how)
    asyncio.run(open_loosening(answer, None, wishes, guide))  # type: ignore[arg-type]
    return answer, made[-1]


def tools(*schemas: dict[str, Any], is_strict: bool = False) -> OutputWishes:
    declared = [Tool(f"f{i}", schema, is_strict, f"tools[{i}].parameters") for i, schema in enumerate(schemas)]
    return OutputWishes(ToolUse([], declared, is_required=True, allows_many=True))


def schemas(wishes: OutputWishes) -> list[dict[str, Any]]:
    assert wishes.use is not None
    return [tool.parameters for tool in wishes.use.tools]


@pytest.mark.parametrize("format", [HERMES, HARMONY, PYTHONIC, QWEN3_CODER], ids=lambda format: format.name)
def test_only_the_tool_that_the_compiler_names_is_loosened(format: ToolFormat) -> None:
    answer, wishes = opened(tools(GOOD, BAD, GOOD), format)
    assert schemas(wishes)[::2] == [GOOD, GOOD]
    assert schemas(wishes)[1]["properties"] == {"a": TEXT, "b": {}}
    assert answer.lost == ["tools[1].parameters.properties"]
    assert answer.num_opened == 2


@pytest.mark.parametrize("format", [HERMES, PYTHONIC, HARMONY])
def test_only_the_tool_in_which_too_much_meets_is_loosened(format: ToolFormat) -> None:
    many = {"allOf": [{"type": "string", "pattern": f"[a-z]*{letter}[a-z]*"} for letter in "abcdefghijklmnopqrst"]}
    for bad in (many, {"allOf": [{"type": "integer", "multipleOf": number} for number in (97, 89, 83)]}):
        answer, wishes = opened(tools(GOOD, {"type": "object", "properties": {"a": TEXT, "b": bad}}, GOOD), format)
        assert schemas(wishes)[::2] == [GOOD, GOOD]
        assert schemas(wishes)[1]["properties"] == {"a": TEXT, "b": {}}
        assert (answer.lost, answer.num_opened) == (["tools[1].parameters.properties"], 2)


def test_what_is_wrong_inside_a_member_leaves_the_other_members_as_they_are() -> None:
    bad = {**BAD_INSIDE, "properties": {**BAD_INSIDE["properties"], "c": {"type": "integer", "maximum": 3}}}
    _, wishes = opened(tools(bad))
    assert schemas(wishes)[0]["properties"] == {"a": {"type": "object"}, "c": {"type": "integer", "maximum": 3}}


def test_several_tools_are_found_one_after_the_other() -> None:
    answer, wishes = opened(tools(BAD, GOOD, BAD_INSIDE))
    assert schemas(wishes)[1] == GOOD
    assert answer.lost == ["tools[0].parameters.properties", "tools[2].parameters.properties"]


def test_the_last_try_frees_every_tool() -> None:
    answer, wishes = opened(tools(GOOD, *[BAD] * 10))
    assert schemas(wishes) == [FREE_OBJECT] * 11
    assert answer.num_opened == MAX_STEPS + 1


def test_a_strict_tool_is_refused_by_its_path() -> None:
    with pytest.raises(JsonSchemaError) as raised:
        opened(tools(GOOD, BAD, is_strict=True))
    assert raised.value.param == "tools[1].parameters"
    assert raised.value.message.startswith("tools[1].parameters: the grammar cannot be used")


def test_a_structure_that_is_not_strict_is_loosened() -> None:
    answer, wishes = opened(OutputWishes(structure=json_structure(BAD, "format", is_lenient=True)))
    assert wishes.structure is not None and wishes.structure.loose is not None
    assert wishes.structure.loose["properties"] == {"a": TEXT, "b": {}}
    assert answer.lost == ["format.properties"]
    with pytest.raises(JsonSchemaError) as raised:
        opened(OutputWishes(structure=json_structure(BAD, "format")))
    assert raised.value.param == "format"


def test_refusals_without_an_end_end() -> None:
    with pytest.raises(GrammarError) as raised:
        opened(tools(BAD), refuses_all=True)
    assert raised.value.message == "tools: the grammar cannot be used: too complex"
