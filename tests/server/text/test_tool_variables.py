import json

import pytest

from weft.server.text.chat_template import ChatTemplate
from weft.server.text.template_forms import with_tools

FUNCTION = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ tools | tojson }}", json.dumps(TOOLS)),
        ("{% for tool in xml_tools %}{{ tool.function.name }}{% endfor %}", "now"),
        ("{{ functions }}", json.dumps([FUNCTION], indent=4)),
        ("{{ 'Today is ' + datetime if functions else 'no' }}", "Today is 2"),
        ("{{ datetime is defined }}", "False"),
        ("{{ tools | length }}{{ xml_tools is defined }}", "1False"),
    ],
)
def test_a_template_gets_tools_under_the_name_that_it_knows(template: str, shown: str) -> None:
    """SmolLM 3 was refused as a model without tools: its template reads `xml_tools`."""
    assert ChatTemplate(template).render([], False, {"tools": TOOLS}).startswith(shown)


def test_what_the_caller_sets_stands() -> None:
    given = {"tools": TOOLS, "xml_tools": [], "datetime": "then"}
    assert with_tools(given, frozenset({"xml_tools", "functions", "datetime"})) | given == {
        **given,
        "functions": json.dumps([FUNCTION], indent=4),
    }
    assert with_tools(given, frozenset({"xml_tools", "datetime"}))["datetime"] == "then"


@pytest.mark.parametrize("tools", [None, [], "text"])
def test_nothing_is_added_without_tools(tools: object) -> None:
    assert with_tools({"tools": tools}, frozenset({"xml_tools", "functions"})) == {"tools": tools}
