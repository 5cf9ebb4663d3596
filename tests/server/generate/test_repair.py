"""The engine's refusal of a grammar, with the grammar compiler's own messages and a fake answer."""

import asyncio
import gc
import json
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher

from weft.engine.guidance.matcher import one_line
from weft.engine.guidance.meeting import check_meeting
from weft.engine.wire.messages import MAX_GRAMMAR_BYTES, Guidance
from weft.server.errors import GrammarError, JsonSchemaError
from weft.server.formats.harmony import HARMONY
from weft.server.formats.json_calls import HERMES
from weft.server.formats.parser import AnswerRules, Tool, ToolFormat
from weft.server.formats.pythonic_calls import PYTHONIC
from weft.server.formats.xml_families import QWEN3_CODER
from weft.server.generate import repair
from weft.server.generate.repair import LATE_S, MAX_TRIES, MORE_TRIES, open_loosening
from weft.server.json_schema.loosen import loosened
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


class FakeClient:
    """The client of one model."""


CLIENT = FakeClient()


class FakeAnswer:
    """Compiles the grammar when it is opened."""

    def __init__(self, guidance: Guidance, refuses_all: bool = False) -> None:
        self.guidance = guidance
        self.lost: list[str] = []
        self.tried: list[str] = []
        self._refuses_all = refuses_all

    def guide(self, guidance: Guidance) -> None:
        self.guidance = guidance

    async def refusal(self, client: Any, text: str) -> str | None:
        self.tried.append(text)
        fault = (
            "too complex" if self._refuses_all else meeting_fault(text) or one_line(LLMatcher.validate_grammar(text))
        )
        return f"the grammar cannot be used: {fault}" if fault else None

    async def open(self, client: Any) -> None:
        if fault := await self.refusal(client, self.guidance.grammar or ""):
            raise GrammarError(fault)


def opened(
    wishes: OutputWishes, format: ToolFormat = HERMES, answers: Any = None, client: Any = CLIENT, **how: Any
) -> tuple[FakeAnswer, OutputWishes]:
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
    if answers is not None:
        answers.append(answer)
    asyncio.run(open_loosening(answer, client, wishes, guide))
    return answer, made[-1]


def tools(*schemas: dict[str, Any], is_strict: bool = False) -> OutputWishes:
    declared = [Tool(f"f{i}", schema, is_strict, f"tools[{i}].parameters") for i, schema in enumerate(schemas)]
    return OutputWishes(ToolUse([], declared, is_required=True, allows_many=True))


def schemas(wishes: OutputWishes) -> list[dict[str, Any]]:
    assert wishes.use is not None
    return [tool.parameters for tool in wishes.use.tools]


def enforced(answer: FakeAnswer) -> str:
    """The grammar that was opened, without the escapes of JSON in JSON."""
    return (answer.guidance.grammar or "").replace("\\", "")


@pytest.mark.parametrize("format", [HERMES, HARMONY, PYTHONIC, QWEN3_CODER], ids=lambda format: format.name)
def test_only_the_part_that_is_at_fault_is_freed(format: ToolFormat) -> None:
    """The siblings of one contradictory member were freed with it, and the tool's other keywords."""
    bad = {
        **BAD,
        "properties": {"first": {"enum": ["v1", "v2"]}, **BAD["properties"], "last": {"maxLength": 77, **TEXT}},
    }
    answer, wishes = opened(tools(GOOD, bad, GOOD), format)
    assert schemas(wishes) == [GOOD, {**bad, "properties": {**bad["properties"], "b": {}}}, GOOD]
    assert answer.lost == ["tools[1].parameters.properties.b.allOf"]
    assert len(answer.tried) < 20


MANY = {"allOf": [{"type": "string", "pattern": f"[a-z]*{letter}[a-z]*"} for letter in "abcdefghijklmnopqrst"]}
MULTIPLES = {"allOf": [{"type": "integer", "multipleOf": number} for number in (97, 89, 83)]}
NO_TEXT = {"type": "string", "pattern": "^a$", "minLength": 5}


@pytest.mark.parametrize(
    ("part", "left", "path"),
    [
        (MANY, {"allOf": MANY["allOf"][:12] + [{}] * 8}, None),
        (MULTIPLES, {"allOf": [MULTIPLES["allOf"][0], MULTIPLES["allOf"][1], {}]}, None),
        (EMPTY, {}, ".allOf"),
        (NO_TEXT, {"type": "string", "pattern": "^a$"}, ".minLength"),
        (BAD_INSIDE, {**BAD_INSIDE, "properties": {"a": {**BAD_INSIDE["properties"]["a"], "properties": {"b": {}}}}},
         ".properties.a.properties.b.allOf"),
        ({"type": "array", "items": EMPTY, "minItems": 1, "maxItems": 3},
         {"type": "array", "items": {}, "minItems": 1, "maxItems": 3}, ".items.allOf"),
        ({"type": "array", "prefixItems": [TEXT, NO_TEXT], "minItems": 2},
         {"type": "array", "prefixItems": [TEXT, {"type": "string", "pattern": "^a$"}], "minItems": 2},
         ".prefixItems[1].minLength"),
        ({"anyOf": [EMPTY, NO_TEXT]}, {}, ".anyOf"),
        ({"type": "object", "patternProperties": {"^a": TEXT, "^a?b": TEXT}, "additionalProperties": False},
         {"type": "object", "additionalProperties": True}, ".patternProperties"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("format", [HERMES, PYTHONIC, HARMONY], ids=lambda format: format.name)
def test_the_smallest_part_is_freed(format: ToolFormat, part: Any, left: Any, path: str | None) -> None:
    def schema(part: Any) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": TEXT, "b": part, "c": GOOD}, "required": ["b", "c"]}

    answer, wishes = opened(tools(GOOD, schema(part)), format)
    if path is None:
        assert schemas(wishes)[1]["properties"]["a"] == TEXT and schemas(wishes)[1]["properties"]["c"] == GOOD
    else:
        assert schemas(wishes) == [GOOD, schema(left)]
        assert answer.lost == [f"tools[1].parameters.properties.b{path}"]


def test_a_part_of_a_definition_is_named_as_the_caller_has_it() -> None:
    """Members that share a definition keep the rest of it."""
    item = {"type": "object", "properties": {"bad": NO_TEXT, "good": {"enum": ["v1"]}}, "required": ["bad", "good"]}
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/Item"}},
        "required": ["x"],
        "$defs": {"Item": item},
    }
    answer, _ = opened(tools(loosened(schema).schema))
    assert answer.lost == ["tools[0].parameters.$defs.Item.properties.bad.pattern"]
    assert '"v1"' in enforced(answer) and "^a$" not in enforced(answer)


def test_every_tool_with_a_fault_keeps_the_rest() -> None:
    answer, wishes = opened(tools(GOOD, *[BAD, BAD_INSIDE] * 4, GOOD))
    assert schemas(wishes)[0] == schemas(wishes)[-1] == GOOD
    assert [schema["required"] for schema in schemas(wishes)] == [["a"], *[["b"], ["a"]] * 4, ["a"]]
    assert len(answer.lost) == 8


def test_the_log_names_what_is_not_enforced_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    answer, _ = opened(tools(GOOD, {"type": "object", "properties": {"told": EMPTY}, "required": ["told"]}))
    assert answer.lost == ["tools[1].parameters.properties.told.allOf"]
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == answer.lost


def test_the_number_of_tries_is_bounded_and_what_is_not_known_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "MAX_S", 600.0)  # how fast the machine is says nothing
    answer, wishes = opened(tools(GOOD, *[BAD] * 16, GOOD))
    assert {repr(schema) for schema in schemas(wishes)[::17]} == {repr(GOOD)}, "as many as an MCP server brings"
    assert {repr(schema["properties"]) for schema in schemas(wishes)[1:-1]} == {repr({"a": TEXT, "b": {}})}
    wide = {"type": "object", "properties": {f"m{i}": BAD["properties"]["b"] for i in range(200)}}
    answer, wishes = opened(tools(GOOD, wide))
    assert len(answer.tried) <= MAX_TRIES + 2 * MORE_TRIES + 4
    assert schemas(wishes)[0] == GOOD


def test_a_repaired_grammar_is_remembered() -> None:
    """Each turn of an agent with such a tool paid for the search again."""
    first, _ = opened(tools(BAD, {"type": "object", "properties": {"remembered": TEXT}}))
    second, _ = opened(tools(BAD, {"type": "object", "properties": {"remembered": TEXT}}))
    assert (len(second.tried), second.lost, second.guidance) == (1, first.lost, first.guidance)
    for num_tries in (1, 0):
        strict = tools(BAD, {"type": "object", "properties": {"refused": TEXT}}, is_strict=True)
        with pytest.raises(JsonSchemaError, match=r"tools\[0\]") as raised:
            opened(strict, answers=(answers := []))
        assert (len(answers[0].tried) > 0) == bool(num_tries), raised.value


def test_what_one_model_refuses_another_may_take() -> None:
    """Two models of one server shared the outcomes: their vocabularies are not the same."""
    wishes = tools(BAD, {"type": "object", "properties": {"two_models": TEXT}})
    one, other = FakeClient(), FakeClient()
    tried = [len(opened(wishes, client=client)[0].tried) for client in (one, other, one)]
    assert tried[0] == tried[1] > tried[2] == 1


def test_nothing_is_kept_of_a_model_that_is_gone() -> None:
    """The outcomes kept the clients of models that were taken away, with their sockets and tasks."""
    client = FakeClient()
    opened(tools(BAD, {"type": "object", "properties": {"gone": TEXT}}), client=client)
    seen = weakref.ref(client)
    del client
    gc.collect()
    assert seen() is None


def test_a_search_without_time_is_made_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy engine answers late: each turn of an agent waited for the whole time of a search."""
    many = tools(BAD, {"type": "object", "properties": {"made_again": TEXT}})
    monkeypatch.setattr(repair, "MAX_S", -1.0)
    late, _ = opened(many)
    assert "tools[1].parameters.properties" in late.lost
    monkeypatch.setattr(repair, "MAX_S", 5.0)
    again, _ = opened(many)
    assert (len(again.tried), again.lost) == (1, late.lost)
    later = time.monotonic() + LATE_S + 1
    monkeypatch.setattr(repair.time, "monotonic", lambda: later)
    assert opened(many)[0].lost == ["tools[0].parameters.properties.b.allOf"]


def test_tools_whose_grammar_is_too_long_are_fitted_to_it() -> None:
    """Formats of XML write four times the text of a schema, and so lost all of it, anew with each request."""
    members = {f"member_{i}": {"type": "string", "maxLength": 100} for i in range(12)}
    many = tools(*({"type": "object", "properties": {f"tool_{i}": TEXT, **members}} for i in range(60)))
    answer, wishes = opened(many, QWEN3_CODER)
    assert len(answer.tried) == 2
    assert MAX_GRAMMAR_BYTES // 4 < len(answer.guidance.grammar or "") <= MAX_GRAMMAR_BYTES
    assert all(set(schema["properties"]) > set(members) for schema in schemas(wishes)) and answer.lost


def test_a_strict_tool_is_refused_by_its_path() -> None:
    with pytest.raises(JsonSchemaError) as raised:
        opened(tools(GOOD, BAD, is_strict=True))
    assert raised.value.param == "tools[1].parameters"
    at = "tools[1].parameters.properties.b.allOf"
    why = "it leaves no value beside what else is asked there"
    assert raised.value.message == f"{at} cannot be enforced by a grammar: {why} (tool 'f1')"


@pytest.mark.parametrize(
    ("part", "path", "why"),
    [
        ({"type": "number", "minimum": 1e300}, "minimum", "bounds must be 0, or 1e-50 to 9e+18 from 0"),
        ({"type": "number", "maximum": -1e20}, "maximum", "bounds must be 0, or 1e-50 to 9e+18 from 0"),
        ({"type": "integer", "minimum": -(2**63)}, "minimum", "bounds must be 0, or 1e-50 to 9e+18 from 0"),
        ({"type": "number", "exclusiveMinimum": 5e-324}, "exclusiveMinimum", "bounds must be"),
        ({"type": "number", "multipleOf": 1e-20}, "multipleOf", "multiples may be at most 4294967295"),
        ({"type": "integer", "multipleOf": 10**30}, "multipleOf", "multiples may be at most 4294967295"),
        (EMPTY, "allOf", "it leaves no value beside what else is asked there"),
        (
            {"type": "string", "minLength": 2000, "pattern": "^(ab|cd)+$"},
            "pattern",
            "of one text take too much together",
        ),
    ],
)
def test_what_only_the_library_refuses_is_said_in_words_of_schemas(part: Any, path: str, why: str) -> None:
    """Ranges of Rust were shown, and a dump of its expression."""
    schema = {"type": "object", "properties": {"a": TEXT, "b": part}, "required": ["b"]}
    for wishes in (tools(schema, is_strict=True), OutputWishes(structure=json_structure(schema, "format"))):
        with pytest.raises(JsonSchemaError) as raised:
            opened(wishes)
        assert f"{raised.value.param}.properties.b.{path} cannot be enforced by a grammar: " in raised.value.message
        assert why in raised.value.message and "Regex" not in raised.value.message


def test_what_is_strict_stays_beside_what_is_not() -> None:
    wishes = tools(GOOD, BAD)
    assert wishes.use is not None
    strict = replace(wishes.use.tools[0], is_strict=True)
    mixed = replace(wishes, use=replace(wishes.use, tools=[strict, wishes.use.tools[1]]))
    answer, made = opened(mixed)
    assert schemas(made)[0] == GOOD and answer.lost == ["tools[1].parameters.properties.b.allOf"]


@pytest.mark.parametrize("others", [None, GOOD])
def test_a_structure_that_is_not_strict_is_loosened(others: Any) -> None:
    use = tools(others).use if others else None
    answer, wishes = opened(OutputWishes(use, json_structure(BAD, "format", strict=None)))
    assert wishes.structure is not None and wishes.structure.schema is not None
    assert wishes.structure.schema["properties"] == {"a": TEXT, "b": {}}
    assert answer.lost == ["format.properties.b.allOf"]
    with pytest.raises(JsonSchemaError) as raised:
        opened(OutputWishes(use, json_structure(BAD, "format")))
    assert raised.value.param == "format" and "format.properties.b.allOf" in raised.value.message


def test_an_answer_that_is_free_is_still_json() -> None:
    answer, wishes = opened(OutputWishes(structure=json_structure(EMPTY, "format", strict=None)))
    assert wishes.structure is not None and wishes.structure.schema == {}
    assert answer.lost == ["format.allOf"]


def test_refusals_without_an_end_end() -> None:
    with pytest.raises(GrammarError) as raised:
        opened(tools(BAD), refuses_all=True)
    assert raised.value.message == "tools[0].parameters: the grammar cannot be used: too complex"
