from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.server.text.detokenizer import StopStrings

_TEXT = st.text(alphabet="abn\n", max_size=30)
_STOPS = st.lists(st.text(alphabet="abn\n", min_size=1, max_size=6), max_size=4)


def _run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include)
    released = "".join([matcher.feed(piece) for piece in pieces]) + matcher.finish()
    return released, matcher.matched


def _reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first prefix of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(text=_TEXT, stops=_STOPS, cuts=st.sets(st.integers(0, 30)), include=st.booleans())
def test_every_split_gives_the_same_text_and_match(text: str, stops: list[str], cuts: set[int], include: bool) -> None:
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    assert _run(pieces, stops, include) == _reference(text, stops, include)


@given(text=_TEXT, stops=_STOPS)
def test_what_is_held_is_exactly_the_longest_suffix_that_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops, include=False)
    released = ""
    for i, char in enumerate(text):
        released += matcher.feed(char)
        if matcher.matched is not None:
            return
        seen = text[: i + 1]
        suffixes = [seen[start:] for start in range(len(seen) + 1)]
        longest = next(s for s in suffixes if not s or any(stop != s and stop.startswith(s) for stop in stops))
        assert released == seen.removesuffix(longest)


def test_holds_a_prefix_and_lets_it_go_when_it_becomes_nothing() -> None:
    matcher = StopStrings(["\n\nUser:"], include=False)
    assert matcher.feed("Hi\n") == "Hi"
    assert matcher.feed("\nUs") == ""
    assert matcher.feed("ually") == "\n\nUsually"
    assert matcher.matched is None


def test_drops_what_follows_a_match() -> None:
    matcher = StopStrings(["END"], include=False)
    assert matcher.feed("abcEN") == "abc"
    assert matcher.feed("D and more") == ""
    assert matcher.matched == "END"
    assert matcher.feed("END again") == ""
    assert matcher.finish() == ""


def test_keeps_the_stop_string_when_asked() -> None:
    assert _run(["abcE", "NDxyz"], ["END"], include=True) == ("abcEND", "END")


def test_releases_the_held_text_at_the_end() -> None:
    assert _run(["abcEN"], ["END"]) == ("abcEN", None)


def test_the_match_that_ends_first_wins() -> None:
    assert _run(["abcd"], ["abcd", "bc"]) == ("a", "bc")
    assert _run(["xabc"], ["bc", "abc"]) == ("x", "abc")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""], include=False)
