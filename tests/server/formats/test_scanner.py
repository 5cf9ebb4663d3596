import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.server.formats.parser import Scanner, Steps


class _Value(Scanner):
    """Reads one JSON value, and nothing after it."""

    def __init__(self) -> None:
        self.value = ""
        self.is_whole: bool | None = None
        super().__init__()

    def _read(self) -> Steps[None]:
        self.is_whole = yield from self._json(self._add)
        while not self._is_over:
            yield

    def _add(self, text: str) -> None:
        self.value += text


def read(parts: list[str]) -> tuple[str, bool | None]:
    """The value so far, and whether it is whole; None: it goes on."""
    scanner = _Value()
    for part in parts:
        scanner.feed(part)
    so_far = scanner.is_whole
    scanner.finish()
    return scanner.value, so_far


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=80, deadline=None)
@given(_json, st.booleans(), st.sampled_from([",", "}", "\n</tool_call>", " x"]))
def test_the_end_of_a_value(value: object, is_ascii: bool, behind: str) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    assert read([text + behind]) == (text, True)
    assert read([*text, *behind]) == (text, True)


@pytest.mark.parametrize(
    ("text", "value"),
    [("x", ""), ("{'a'", "{"), ('{"a": <', '{"a": '), ("}", ""), (" 1", ""), ("[1, #", "[1, ")],
)
def test_what_cannot_be_json_breaks(text: str, value: str) -> None:
    assert read([text]) == (value, False)
    assert read([*text]) == (value, False)


@pytest.mark.parametrize("text", ["{", '{"a', '"\\', "[1, ", "12", "tru"])
def test_a_value_that_goes_on(text: str) -> None:
    assert read([text]) == (text, None)
    assert read([*text]) == (text, None)
