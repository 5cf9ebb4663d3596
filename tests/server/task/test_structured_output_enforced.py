import json
import logging
from typing import Any

import pytest
from llguidance import LLMatcher

from weft.server.formats.grammar import guided_schema
from weft.server.formats.parser import Tool
from weft.server.task.structured_output import MAX_LOST, enforceable, exact

TEXT = {"type": "string"}
LOOKAHEAD = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)"}}}


def test_only_the_tool_that_cannot_be_enforced_changes(caplog: pytest.LogCaptureFixture) -> None:
    good = {"type": "object", "properties": {"x": TEXT}, "required": ["x"]}
    tools = [Tool("good", good, at="tools[0]"), Tool("bad", LOOKAHEAD, at="tools[1]"), Tool("own", good, True)]
    with caplog.at_level(logging.WARNING):
        made, lost = enforceable(tools)
    assert [tool.parameters for tool in made] == [good, {"type": "object", "properties": {"x": TEXT}}, good]
    assert lost == ["tools[1].properties.x.pattern"]
    assert [record.getMessage() for record in caplog.records] == [
        "The schema of bad is followed in part: a grammar cannot enforce tools[1].properties.x.pattern"
    ]


def test_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        enforceable([Tool("said once", LOOKAHEAD, at="tools[7]")])
    assert len(caplog.records) == 1


def test_what_clients_name_cannot_forge_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    schema = {"properties": {"a\n12:00:00 ERROR forged \x1b[31m": {"type": "string", "pattern": "(?=a)"}}}
    enforceable([Tool("odd\rname", schema, at="tools[0]")])
    assert "forged" in caplog.messages[0] and caplog.messages[0].isprintable()


def test_what_does_not_fit_is_told() -> None:
    values = [f"value {i}" for i in range(20_000)]
    tools = [
        Tool("nested", {"type": "object", "properties": {"a": {"properties": {"b": {"enum": values}}}}}, at="tools[0]"),
        Tool("small", {"type": "object", "properties": {"a": TEXT}}, at="tools[1]"),
    ]
    made, lost = enforceable(tools)
    assert [tool.parameters["properties"] for tool in made] == [{"a": {}}, {"a": TEXT}]
    assert lost == ["tools[0].properties"]


def test_the_number_of_paths_is_bounded() -> None:
    many: dict[str, Any] = {f"m{i}": {"not": TEXT} for i in range(MAX_LOST * 2)}
    _, lost = enforceable([Tool("many", {"type": "object", "properties": many}, at="t")])
    assert len(lost) == MAX_LOST


@pytest.mark.parametrize(
    "part",
    [
        {"type": "integer", "maximum": 2**63 - 1},
        {"type": "integer", "multipleOf": 70_001},
        {"type": "object", "patternProperties": {"^[0-9]+$": TEXT, "^[a-z]+$": {"type": "null"}}},
    ],
)
def test_what_is_strict_may_cost_more(part: dict[str, Any]) -> None:
    """The compiler takes what is left out elsewhere for its size, and tells what it cannot follow."""
    schema = {"type": "object", "properties": {"a": part}}
    assert exact(schema, "tools[0]", is_object=True) == schema
    assert not LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": guided_schema(schema)}]}))
    _, lost = enforceable([Tool("loose", schema, at="t")])
    assert lost
