"""Repeats inside repeats: what is one is joined, and what no automaton counts has no counterpart."""

import json
import re
from itertools import product

import llguidance
import pytest

from weft.server.json_schema.patterns import countable, portable


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("^([a-z]{1,200}){1,200}$", "^[a-z]{1,40000}$"),
        ("^(([a-z]{1,10}){1,10}){1,10}$", "^[a-z]{1,1000}$"),
        ("^([a-z]{0,50}){0,50}x$", "^[a-z]{0,2500}x$"),
        ("^([a-z]+){1,5000}$", "^[a-z]{1,}$"),
        ("^(?:a{2,3}){2,4}$", "^a{4,12}$"),
        ("^(a{3})?b$", "^(a{3})?b$"),
        ("^(a{5,6}){1,9}$", "^(a{5,6}){1,9}$"),
        ("^(a{2,3}){0,4}$", "^(a{2,3}){0,4}$"),
        ("^(a*)*$", "^a{0,}$"),
        ("^(ab|c{1,3}){1,3}$", "^(ab|c{1,3}){1,3}$"),
    ],
)
def test_a_repeat_of_a_repeat_is_one(pattern: str, written: str) -> None:
    assert portable(pattern) == written
    for size in range(16):
        assert bool(re.search(pattern, "a" * size)) == bool(re.search(written, "a" * size))


LATE = [
    "^([a-z]{1,200}-?){1,200}$",
    "^([a-z]{1,25}-?){1,25}$",
    "^([a-z]{1,2}-?){1,500}$",
    "^(([a-z]{1,8}-?){1,8}_?){1,8}$",
    "^([a-z]+-?){1,5000}$",
    "^(-?[a-z]{1,60}){1,60}$",
    "^([a-z]{1,60}[a-f]){1,60}$",
]


@pytest.mark.parametrize("pattern", LATE)
def test_counts_that_cannot_be_kept_have_no_counterpart(pattern: str) -> None:
    """They passed the compiler, and the answer failed in the middle of the text."""
    assert portable(pattern) is None


EXACT = [
    "^([a-z]{1,20}-?){1,20}$",
    "^([a-z]{1,200} ){1,200}$",
    "^( [a-z]{1,200}){1,200}$",
    "^(\\p{L}{1,30}\\s){1,30}$",
    "^([a-z]{1,63}\\.){1,8}[a-z]{2,63}$",
    "^(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\\.){1,8}[a-z]{2,63}$",
    "^(.{1,100}\\n){1,100}$",
    "^([a-z]{5}-?){1,200}$",
    "^([a-z]{1,200}-?)+$",
    "^([a-z]{1,80}-?){1,5}$",
    "^([a-z]{1,4}-?){1,100}$",
]


@pytest.mark.parametrize("pattern", EXACT)
def test_what_can_be_counted_is_kept_and_can_be_followed(pattern: str) -> None:
    written = portable(pattern)
    assert written is not None
    grammar = {"grammars": [{"lark_grammar": f"start: /{written[1:-1]}/"}]}
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), json.dumps(grammar))
    for char, _ in product("abc", range(50)):
        if not matcher.try_consume_tokens([ord(char)]):
            matcher.try_consume_tokens([next(i for i in b" .-\n" if matcher.validate_tokens([i]))])
        matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()


def test_expressions_of_a_grammar_are_joined_or_refused() -> None:
    assert countable("([a-z]{1,200}){1,200}") == "[a-z]{1,40000}"
    assert [countable(pattern[1:-1]) for pattern in LATE] == [None] * len(LATE)
    for other in ("a{2}", "[a&&b]+", "(a|b)*c", "(?x) a", "("):
        assert countable(other) == other
