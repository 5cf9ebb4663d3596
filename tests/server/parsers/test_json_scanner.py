import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.parsers.json_scanner import JsonScanner


def scan(parts: list[str]) -> tuple[int, bool, bool]:
    """How many characters were scanned, and how it ended."""
    scanner, num_scanned = JsonScanner(), 0
    for part in parts:
        end = scanner.scan(part, 0)
        num_scanned += end
        if end < len(part):
            break
    return num_scanned, scanner.is_finished, scanner.is_broken


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=80, deadline=None)
@given(_json, st.booleans(), st.sampled_from([",", "}", "\n</tool_call>", " x"]))
def test_the_end_of_a_value(value: object, is_ascii: bool, behind: str) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    expected = len(text), True, False
    assert scan([text + behind]) == expected
    assert scan([*text, *behind]) == expected


@pytest.mark.parametrize(
    ("text", "num_scanned"), [("x", 0), ("{'a'", 1), ('{"a": <', 6), ("}", 0), ("", 0), (" 1", 0), ("[1, #", 4)]
)
def test_what_cannot_be_json_breaks(text: str, num_scanned: int) -> None:
    assert scan([text]) == (num_scanned, False, text != "")
    assert scan([*text]) == (num_scanned, False, text != "")


@pytest.mark.parametrize("text", ["{", '{"a', '"\\', "[1, ", "12", "tru"])
def test_a_value_that_goes_on(text: str) -> None:
    assert scan([text]) == (len(text), False, False)


def test_a_value_in_the_middle_of_a_text() -> None:
    scanner = JsonScanner()
    assert scanner.scan('ab{"c": 1}d', 2) == 10
    assert scanner.is_finished
