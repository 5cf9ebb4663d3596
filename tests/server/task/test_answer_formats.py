"""Formats of an answer in the forms of all APIs, read as people mean them."""

import json
from typing import Any

import pytest

from weft.server.task.bodies import ChatCompletionBody
from weft.server.task.structured_output import Structure, structure_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 7}}, "required": ["a"]}


def read(format: Any) -> Structure | None:
    return structure_of(ChatCompletionBody.model_validate({"messages": [], "response_format": format}))


FORMS: list[tuple[Any, str]] = [  # a format, and where its schema is
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, ".json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, ".json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"name": "my answer: 1/2!", "schema": SCHEMA}}, ".json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"name": None, "schema": json.dumps(SCHEMA)}}, ".json_schema.schema"),
    ({"json_schema": {"name": "n", "schema": SCHEMA}}, ".json_schema.schema"),
    ({"type": "json_schema", "json_schema": SCHEMA}, ".json_schema"),
    ({"type": "json_schema", "json_schema": json.dumps(SCHEMA)}, ".json_schema"),
    ({"type": "json_schema", "name": "n", "schema": SCHEMA}, ".schema"),
    ({"type": "json_schema", "schema": SCHEMA}, ".schema"),
    ({"type": "json_object", "schema": SCHEMA}, ".schema"),
    ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, ".json_schema.schema"),
    ({"type": "json", "value": SCHEMA}, ".value"),
    ({"type": "json", "schema": SCHEMA}, ".schema"),
    ({"schema": SCHEMA}, ".schema"),
    (SCHEMA, ""),
    ({**SCHEMA, "type": ["object"]}, ""),
    # wrapped twice
    ({"json_schema": {"json_schema": {"name": "n", "schema": SCHEMA}}}, ".json_schema.json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
     ".json_schema.json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"name": "n", "json_schema": SCHEMA}}, ".json_schema.json_schema"),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"schema": SCHEMA}}}, ".json_schema.schema.schema"),
    ({"type": "json_schema", "schema": {"name": "n", "schema": json.dumps(SCHEMA)}}, ".schema.schema"),
    ({"type": "json_object", "schema": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
     ".schema.json_schema.schema"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "at"), FORMS)
def test_the_schema_is_found_where_it_is(format: Any, at: str) -> None:
    """Beside json_object it was dropped; without its wrapper or its name it was a 400."""
    structure = read(format)
    assert structure is not None and structure.schema is not None
    assert structure.schema["properties"] == SCHEMA["properties"]
    assert (structure.param, structure.is_strict) == (f"response_format{at}", False)


@pytest.mark.parametrize("format", [{"type": "json_object"}, {"type": "json"}, "json_object", "json",
                                    {"type": "json_object", "schema": {}}, {"type": "json_object", "schema": None},
                                    {"type": "json_object", "json_schema": None}])  # fmt: skip
def test_any_object(format: Any) -> None:
    structure = read(format)
    assert structure is not None and structure.schema == {"type": "object"}


def test_what_is_strict_stays_strict() -> None:
    for format in ({"type": "json_schema", "strict": True, "schema": SCHEMA},
                   {"type": "json_schema", "json_schema": {"strict": True, "schema": SCHEMA}},
                   {"type": "json_schema", "strict": True, "json_schema": {"schema": SCHEMA}},
                   {"json_schema": {"strict": True, "json_schema": {"name": "n", "schema": SCHEMA}}}):  # fmt: skip
        structure = read(format)
        assert structure is not None and structure.is_strict


@pytest.mark.parametrize("wrapper", [{"name": "n", "parameters": SCHEMA}, {"schemas": SCHEMA}])
def test_a_schema_that_is_not_found_is_reported(site: Any, wrapper: Any) -> None:
    """The answer was free, and nobody was told."""
    name = next(name for name in wrapper if name != "name")
    reply = site.chat(response_format={"type": "json_schema", "json_schema": wrapper})
    assert (reply.status, reply.headers["x-ignored-params"]) == (200, f"response_format.json_schema.{name}")


def test_text_is_text() -> None:
    assert read({"type": "text"}) is None
    assert read("text") is None


@pytest.mark.parametrize(
    ("format", "param"),
    [
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": ["xml"]}, "response_format.type"),
        ({"type": [{}]}, "response_format.type"),
        ({"type": {}}, "response_format.type"),
        ({}, "response_format"),
        ({"type": "json_schema", "json_schema": 5}, "response_format.json_schema"),
        ({"type": "json_schema", "schema": [1]}, "response_format.schema"),
    ],
)
def test_what_says_nothing_is_refused(site: Any, format: Any, param: str) -> None:
    reply = site.chat(response_format=format)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(("format", "at"), [form for form in FORMS if form[1]])
def test_the_other_api_reads_them_as_well(site: Any, format: Any, at: str) -> None:
    body = {"input": "Hi", "store": False, "text": {"format": format}}
    reply = site.call("POST", "/v1/responses", json=body)
    assert reply.status == 200, reply.text
    assert '"maximum": 7' in site.engine.asked[-1].guidance.grammar
    odd = json.loads(json.dumps(body).replace("maximum", "multipleOf").replace(": 7", ": 70001"))
    names = site.call("POST", "/v1/responses", json=odd).headers["x-ignored-params"]
    assert names == f"text.format{at}.properties.a.multipleOf"
