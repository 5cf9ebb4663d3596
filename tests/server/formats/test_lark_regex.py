"""Regular Lark grammars as regular expressions."""

import re
import time

import llguidance
import pytest

from weft.server.formats.lark_regex import MAX_REGEX_CHARS, NotRegularError, lark_regex

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?

hunk: add | delete | update  // what is done
add: "*** Add File: " name LF line+
delete: "*** Delete File: " name LF
update: "*** Update File: " name LF move? change?
name: /(.+)/
line: "+" /(.*)/ LF -> added
move: "*** Move to: " name LF
change: (context | changed)+ eof?
context: ("@@" | "@@ " /(.+)/) LF
changed: ("+" | "-" | " ") /(.*)/ LF
eof: "*** End of File" LF

%import common.LF
"""
TEXT = "*** Begin Patch\n*** Update File: a.py\n@@ def f\n-a\n+b\n c\n*** Add File: x\n+hi\n+\n*** End Patch\n"


def test_the_format_of_a_patch_is_regular() -> None:
    pattern = lark_regex(PATCH)
    assert re.fullmatch(pattern, TEXT)
    assert re.fullmatch(pattern, TEXT.rstrip())
    for wrong in (TEXT.replace("*** End Patch", ""), TEXT.replace("+hi\n+\n", ""), TEXT + "x", ""):
        assert not re.fullmatch(pattern, wrong)


@pytest.mark.parametrize(
    ("grammar", "fits", "does_not"),
    [
        ('start: "a"i ~ 2..3', ["aA", "aaa"], ["a", "aaaa"]),
        ('start: "a" ~ 2', ["aa"], ["a", "aaa"]),
        ('start: "a" [B] | /x\\/y/i\nB.2: "b.\\n"', ["a", "ab.\n", "X/Y"], ["abc\n", "xy"]),
        ('?start: (x | "y")*\nx: "0"..."1"', None, None),
        ('start: "#" "//" \'', None, None),
        ("start: INT WS CNAME\n%import common.INT\n%import common.WS\n%import common.CNAME", ["1 a_1"], ["a", "1 1"]),
        ("start: L\n%import common.LETTER -> L", ["b"], ["1"]),
        ('start: "#" "//"  # a comment\n', ["#//"], ["#"]),
        ('start: "a"\n  | "b"\n  | c\nc: "(*)"', ["a", "b", "(*)"], ["c"]),
    ],
)
def test_a_grammar_has_an_expression(grammar: str, fits: list[str] | None, does_not: list[str] | None) -> None:
    if fits is None or does_not is None:
        with pytest.raises(NotRegularError):
            lark_regex(grammar)
        return
    pattern = lark_regex(grammar)
    assert [text for text in fits if not re.fullmatch(pattern, text)] == []
    assert [text for text in does_not if re.fullmatch(pattern, text)] == []


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("start: a\na: b\nb: a", "uses itself"),
        ("start: a", "there is no rule 'a'"),
        ("", "there is no rule 'start'"),
        ('start: ("a"', "brackets"),
        ('start: "a")', "brackets"),
        ('start: ("a"]', "brackets"),
        ("start: * x", "follows nothing"),
        ("start: /a/u", "flags"),
        ("%ignore WS\nstart: /a/", "cannot be read"),
        ("%import common.ESCAPED_STRING\nstart: /a/", "not known"),
        (
            "start: a\n" + "".join(f"{chr(97 + i)}: {chr(98 + i)} {chr(98 + i)}\n" for i in range(24)) + "y: /abc/",
            "takes",
        ),
        ("start: /a/" + " " * MAX_REGEX_CHARS, "characters"),
        ("start: " + "(" * 30000, "nested"),
    ],
)
def test_what_is_not_regular_is_said(grammar: str, said: str) -> None:
    begun = time.monotonic()
    with pytest.raises(NotRegularError, match=said):
        lark_regex(grammar)
    assert time.monotonic() - begun < 2


def test_the_engine_follows_the_expression_inside_json() -> None:
    schema = {"type": "object", "properties": {"input": {"type": "string", "pattern": f"^(?:{lark_regex(PATCH)})$"}}}
    error = llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(schema))
    assert not error
