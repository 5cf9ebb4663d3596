"""Every field that asks for a structure -> one grammar, which accepts what it should and nothing else."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.linear_time import assert_linear
from weft import server
from weft.server.errors import InvalidRequestError, JsonSchemaError
from weft.server.task.bodies import CompletionBody
from weft.server.task.structured_output import Structure, structure_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TAGS = {
    "structures": [
        {"begin": "<f=one>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=two>", "schema": SCHEMA, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def read(**fields: Any) -> Structure | None:
    return structure_of(CompletionBody.model_validate(fields))


@cache
def tokenizer() -> LLTokenizer:
    file = Path(server.__file__).parent / "demo_model" / "tokenizer.json"
    return LLTokenizer(file.read_text(), eos_token=2)


def accepts(structure: Structure | None, text: str) -> bool:
    assert structure is not None
    matcher = LLMatcher(tokenizer(), json.dumps({"grammars": [structure.grammar]}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(tokenizer().tokenize_str(text))) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "param", "good", "bad"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "response_format.json_schema.schema",
            ['{"a": 1}'],
            ['{"a": "x"}', '{"a":1}', '{"a":  1}', "{}", '{"a": 1} '],
        ),
        ({"response_format": {"type": "json_object"}}, "response_format", ['{"b": [1, {}]}', "{}"], ["[1]", "1"]),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", ['{"a": 1}'], ["{}"]),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs.json", ['{"a": -7}'], ["{}"]),
        ({"guided_json": SCHEMA}, "guided_json", ['{"a": 1}'], ["{}"]),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", ["{}"], ["x"]),
        ({"structured_outputs": {"regex": r"a/b\/c\\d{2}"}}, "structured_outputs.regex", [r"a/b/c\dd"], ["a"]),
        ({"guided_regex": "[0-9]+"}, "guided_regex", ["12"], ["a", ""]),
        ({"guided_choice": ["yes", 'no "x"\n']}, "guided_choice", ["yes", 'no "x"\n'], ["no", "yess"]),
        ({"structured_outputs": {"choice": ["é"]}}, "structured_outputs.choice", ["é"], ["e"]),
        ({"guided_grammar": 'start: "a" b\nb: "c"+'}, "guided_grammar", ["acc"], ["a"]),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
            "structured_outputs.structural_tag",
            ["free", "x <f=one>12</f> y", '<f=two>{"a": 1}</f><f=one>3</f>'],
            ["<f=three>1</f>", "<f=one>x</f>", "<f=one>1"],
        ),
        ({"response_format": {"type": "structural_tag", **TAGS}}, "response_format", ["", "<f=one>1</f>"], ["<f=x"]),
    ],
)
def test_what_is_asked_for_is_what_is_accepted(
    fields: dict[str, Any], param: str, good: list[str], bad: list[str]
) -> None:
    structure = read(**fields)
    assert structure is not None
    assert structure.param == param
    assert [text for text in good if not accepts(structure, text)] == []
    assert [text for text in bad if accepts(structure, text)] == []


def test_free_text() -> None:
    assert read() is None
    assert read(response_format={"type": "text"}) is None


def test_only_a_strict_schema_is_taken_literally() -> None:
    """What cannot be enforced is left out unless the client insists."""
    odd = {"type": "string", "format": "color", "minLength": 1.0}
    for strict in (False, None):
        structure = read(
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": odd, "strict": strict}}
        )
        assert structure is not None and structure.schema == {"type": "string", "minLength": 1}
    with pytest.raises(JsonSchemaError, match=r"response_format\.json_schema\.schema\.format cannot be enforced"):
        read(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": odd, "strict": True}})


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.structures", "required"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "together with response"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of its members, got 0"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "got 2"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "must be a JSON object, got '[]'"),
        ({"guided_json": "{"}, "guided_json", "must be a JSON object"),
        ({"guided_regex": "([a-z]{1,90}-?){1,90}"}, "guided_regex", "repeats inside repeats"),
        ({"guided_choice": []}, "guided_choice", "1 to 4096 texts, got 0"),
        (
            {"structured_outputs": {"structural_tag": {"structures": []}}},
            "structured_outputs.structural_tag.triggers",
            "required",
        ),
        (
            {"response_format": {"type": "structural_tag", "triggers": ["<g"], "structures": TAGS["structures"]}},
            "response_format.structures[0].begin",
            "one of the triggers, got '<f=one>'",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        read(**fields)
    assert raised.value.param == param
    assert said in raised.value.message


def test_thousands_of_choices_are_one_terminal() -> None:
    structure = read(guided_choice=[f"choice {i}" for i in range(4096)])
    assert accepts(structure, "choice 4095")
    assert not accepts(structure, "choice 4096")


def test_gbnf_is_told_from_lark() -> None:
    structure = read(guided_grammar='root ::= "yes" | "no"')
    assert structure is not None
    assert structure.grammar == {"gbnf": 'root ::= "yes" | "no"'}
    structure = read(guided_grammar='start: "a ::= b"')
    assert structure is not None
    assert "lark_grammar" in structure.grammar


@pytest.mark.parametrize("filler", ["\n", " ", "\t?", "start", "::=", " \n", "start "])
def test_a_grammar_is_looked_at_in_linear_time(filler: str) -> None:
    """48 KB of line breaks behind "::=" held the event loop up for 28 seconds."""
    assert_linear(lambda size: read(guided_grammar="::=" + filler * (size // len(filler))), 400_000)
