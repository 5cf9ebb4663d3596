import json
import re

import pytest
from llguidance import LLMatcher

from weft.server.json_schema.patterns import MAX_PATTERN_CHARS, portable, prefix_of


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        (r"^[A-Za-z0-9._%+-]+@[a-z.]+\.[A-Za-z]{2,}$", r"^[A-Za-z0-9._%+\-]+@[a-z.]+\.[A-Za-z]{2,}$"),
        (r"^\d{3}-(a|b)*?$", r"^\d{3}-(a|b)*?$"),
        (r"^(?<year>\d{4})$", r"^(\d{4})$"),
        (r"^(?P<x-y>a)(?P<x-y>b)$", "^(a)(b)$"),
        ("^[^]*$", "^(?s:.)*$"),
        (r"^\cA\cj$", r"^\x01\x0a$"),
        (r"\0", r"\x00"),
        (r"^\u0041\x41\u{1F600}$", r"^\x41\x41\U0001f600$"),
        (r"^\ud83d\ude00$", r"^\U0001f600$"),
        ("^{a}$", r"^\{a\}$"),
        ("^a{1,0000003}$", "^a{1,0000003}$"),
        ("a{2", r"a\{2"),
        ("^[[a]$", r"^[\[a]$"),
        ("^[a&&b]$", r"^[a\&\&b]$"),
        (r"^[\b]$", r"^[\x08]$"),
        (r"^[\w-.]$", r"^[\w\-.]$"),
        ("^[[:alpha:]_]$", "^[[:alpha:]_]$"),
        (r"\Aa\Z", "^a$"),
        ("^a$|^b$", "^a$|^b$"),
        ("(^|x)a($|y)", "(^|x)a($|y)"),
        ("(?i)^abc$", "(?i)^abc$"),
        (r"^\p{Lu}\p{Script=Greek}$", r"^\p{Lu}\p{Script=Greek}$"),
        ("", ""),
    ],
)
def test_a_pattern_keeps_its_meaning(pattern: str, written: str) -> None:
    assert portable(pattern) == written
    schema = {"type": "string", "pattern": written}
    assert not LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}))


@pytest.mark.parametrize(
    "pattern",
    [
        *("^(?=.*[a-z]).+$", "^(?!/).*$", "(?<=a)b", "(?<!a)b", r"\bfoo\b", r"\Ba", r"^(['\"]).*\1$", r"(?<a>x)\k<a>"),
        *("^([a-z$", "(", ")", "a)", "[a", "[]", "[", "\\", "*a", "a|*", "[z-a]", "a{2,1}", "a{,3}", "(?P=a)"),
        *("a^b", "a$b", "(^a)+", "^*a", "x(^a)", "(a$)b"),
        *(r"\é", r"\y", r"\K", r"\xZZ", r"\p{Nonsense}", r"\ud83d", r"\ude00", r"\u{110000}"),
        *(
            "(?#a)b",
            "(?>a)b",
            "(a)?(?(1)b|c)",
            "(?x) a",
            "(?m)^a$",
            "a**",
            "a{999999}",
            "^a{1,1000000}$",
            "[0-9]{9999999}",
            "a{" + "9" * 5000 + "}",
        ),
        "(" * 50 + ")" * 50,
        "a" * (MAX_PATTERN_CHARS + 1),
    ],
)
def test_what_has_no_counterpart_is_found(pattern: str) -> None:
    assert portable(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (r"^[^]$", ["\n", "a"], [""]),
        (r"^\cJ$", ["\n"], ["J", "cJ"]),
        (r"^[a&&b~-]$", ["a", "b", "&", "~", "-"], ["c"]),
        (r"^[\w-.]$", ["a", "-", "."], ["+"]),
        (r"^{\d}$", ["{1}"], ["1"]),
        (r"^\ud83d\ude00$", ["\U0001f600"], ["a"]),
    ],
)
def test_the_written_pattern_matches_the_same(pattern: str, matching: list[str], others: list[str]) -> None:
    written = portable(pattern)
    assert written is not None
    assert all(re.search(written, text) for text in matching)
    assert not any(re.search(written, text) for text in others)


def test_a_long_pattern_is_read_in_time() -> None:
    assert portable("(a|[b-d]{1,3})*" * 500) is not None
    assert portable("[" * 8000) is None


@pytest.mark.parametrize(
    ("pattern", "prefix"),
    [
        ("^x-", "x-"),
        (r"^x\.y.*$", "x.y"),
        ("^x-.*", "x-"),
        ("x-", None),
        ("^x$", None),
        ("^[a]", None),
        ("^(?!_)", None),
    ],
)
def test_the_prefix_of_a_pattern(pattern: str, prefix: str | None) -> None:
    assert prefix_of(pattern) == prefix
