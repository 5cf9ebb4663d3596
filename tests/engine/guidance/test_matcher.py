import llguidance
import numpy as np
import pytest

from tests.engine.guidance.demo import VOCAB_SIZE, matcher
from weft.engine.batch import NO_TOKEN_ID
from weft.engine.guidance.matcher import GrammarMatcher, one_line


def masks(matcher: GrammarMatcher, drafts: list[int]) -> list[list[int]]:
    """Ids that each row allows."""
    bits = np.full((1 + len(drafts), VOCAB_SIZE // 32), -1, np.int32)
    matcher.fill_masks(tuple(drafts), bits)
    return [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in bits]


def test_rows_behind_drafts_allow_what_comes_behind_them(vocabulary: llguidance.LLTokenizer) -> None:
    one, two, three = (vocabulary.tokenize_str(digit)[0] for digit in "123")
    followed = matcher(vocabulary, 'start: "1" "2" "3" | "1" "3"')
    first, second, third = masks(followed, [one, two])
    assert one in first
    assert {two, three} <= set(second)
    assert three in third
    assert masks(followed, [one, two]) == [first, second, third]
    assert followed.accept(one) is None
    assert masks(followed, [two]) == [second, third]


def test_rows_that_cannot_be_reached_are_left_alone(vocabulary: llguidance.LLTokenizer) -> None:
    one, two = (vocabulary.tokenize_str(digit)[0] for digit in "12")
    followed = matcher(vocabulary, 'start: "1" "1"')
    assert len(masks(followed, [two, one])[1]) == len(masks(followed, [two, one])[2]) == VOCAB_SIZE
    assert len(masks(followed, [one, one, one])[2]) == VOCAB_SIZE
    assert (followed.accept(one), followed.is_stopped) == (None, False)
    assert (followed.accept(one), followed.is_stopped) == (None, True)


def test_the_end_is_allowed_where_the_grammar_accepts(vocabulary: llguidance.LLTokenizer) -> None:
    followed = matcher(vocabulary, "start: /a{1,3}/")
    assert 0 not in masks(followed, [])[0]
    assert followed.accept(vocabulary.tokenize_str("a")[0]) is None
    assert 0 in masks(followed, [])[0]
    assert (followed.accept(0), followed.is_stopped) == (None, True)
    assert followed.forced_token_ids(100) == []


def test_copies_go_their_own_ways(vocabulary: llguidance.LLTokenizer) -> None:
    one, two = (vocabulary.tokenize_str(digit)[0] for digit in "12")
    followed = matcher(vocabulary, 'start: ("1" | "2") "1"')
    other = followed.copy()
    assert (followed.accept(one), other.accept(two)) == (None, None)
    assert (followed.accept(one), followed.is_stopped, other.is_stopped) == (None, True, False)


def test_forced_ids_are_told_and_not_consumed(vocabulary: llguidance.LLTokenizer) -> None:
    followed = matcher(vocabulary, 'start: "{\\"name\\":" /[0-9]{3}/')
    forced = followed.forced_token_ids(100)
    assert forced
    assert '{"name":'.startswith(vocabulary.decode_str(forced))
    assert followed.forced_token_ids(100) == forced


def test_a_run_of_forced_ids_is_computed_once_and_has_the_masks_that_the_library_computes(
    vocabulary: llguidance.LLTokenizer,
) -> None:
    """Every mask, and every draft, took time in proportion to the rest of the run."""
    known, unknown = (matcher(vocabulary, f'start: "{"0123456789" * 9}" /[a-c]{{3}}/') for _ in range(2))
    forced = known.forced_token_ids(100)
    assert len(forced) > 20
    assert known.copy().forced_token_ids(3) == forced[:3]
    drafts = [*forced[:12], forced[0], forced[13]]  # the last but one is refused
    assert masks(known, drafts)[:13] == masks(unknown, drafts)[:13] == [[i] for i in forced[:13]]
    for token_id in forced[:5]:
        assert known.accept(token_id) is None
    assert known.forced_token_ids(100) == forced[5:]


def test_what_the_grammar_refuses_is_a_fault(vocabulary: llguidance.LLTokenizer) -> None:
    followed = matcher(vocabulary, 'start: "1"')
    fault = followed.accept(vocabulary.tokenize_str("2")[0])
    assert fault is not None
    assert fault.startswith("the grammar cannot be followed any further: ")
    assert "\n" not in fault
    assert followed.accept(vocabulary.tokenize_str("1")[0]) is not None


def test_no_token_left_is_a_fault_of_its_own(vocabulary: llguidance.LLTokenizer) -> None:
    assert "no token is left" in (matcher(vocabulary, 'start: "1"').accept(NO_TOKEN_ID) or "")


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("plain", "plain"),
        ("at 1(8): no\n   1 | start: foo\n              ^\n", "at 1(8): no"),
        ("panic: too large\n<backtrace>\n 0: x\n", "panic: too large"),
        ("first\n<non-verbose/>", "first"),
        ("x" * 400, "x" * 300 + "..."),
    ],
)
def test_a_fault_loses_its_source(fault: str, line: str) -> None:
    assert one_line(fault) == line
