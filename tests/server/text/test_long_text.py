from itertools import count as numbers

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizers_for_tests import byte_level, metaspace, sentencepiece, training_text, wordpiece
from weft.server.text.text_tokenizer import (
    CUT_TOKENS,
    SLICE_CHARS,
    USUAL_CHARS_PER_TOKEN,
    TextTooLongError,
    TokenRoom,
    fitted,
)
from weft.server.text.tokenizer import Tokenizer

TEXT = " ".join(training_text())


class Words:
    """Counts a text in words, and how much of it was looked at."""

    def __init__(self) -> None:
        self.num_chars = 0

    def __call__(self, text: str) -> int:
        self.num_chars += len(text)
        return len(text.split())


def test_what_cannot_fit_is_told_after_a_part_of_it() -> None:
    """It took 36 seconds to encode ten megabytes, only to refuse them."""
    count = Words()
    with pytest.raises(TextTooLongError) as raised:
        fitted("a " * 5_000_000, TokenRoom(100_000), count)
    assert 100_000 < raised.value.num_tokens <= 100_000 + SLICE_CHARS
    assert count.num_chars <= 4 * SLICE_CHARS


def test_short_text_is_not_counted() -> None:
    text = "x" * USUAL_CHARS_PER_TOKEN * 100
    assert fitted(text, TokenRoom(100), lambda text: 1 // 0) is text
    assert fitted(text * 2, None, lambda text: 1 // 0) == text * 2


def test_text_of_few_tokens_fits_however_long_it_is() -> None:
    text = "a" * 3_000_000
    assert fitted(text, TokenRoom(1), Words()) is text


@given(st.integers(1, 40_000), st.integers(0, 300_000))
def test_the_end_that_is_kept_fills_the_room(num_tokens: int, num_chars: int) -> None:
    text = ("ab cde f " * 40_000)[:num_chars]
    count = Words()
    end = fitted(text, TokenRoom(num_tokens, keeps_end=True), count)
    assert text.endswith(end)
    assert len(end.split()) >= min(num_tokens, len(text.split()))
    assert count.num_chars <= num_tokens * 9 + (CUT_TOKENS * 18 + 1) * SLICE_CHARS


@pytest.mark.parametrize("build", [byte_level, sentencepiece, metaspace, wordpiece])
def test_room_changes_no_ids(build: object) -> None:
    """What fits is encoded as a whole; of what is cut, the last ids are those of the whole."""
    tokenizer = Tokenizer(build(), {}, {})  # type: ignore[operator, arg-type]
    text = " ".join([TEXT] * 8)
    whole = tokenizer.encode(text)
    assert len(text) > 2 * SLICE_CHARS
    num_tokens = next(i for i in numbers(1000, 1000) if len(text) > USUAL_CHARS_PER_TOKEN * i)
    end = tokenizer.encode(text, room=TokenRoom(num_tokens, keeps_end=True))
    assert len(end) >= num_tokens
    assert end[-num_tokens:] == whole[-num_tokens:]
    with pytest.raises(TextTooLongError) as raised:
        tokenizer.encode(text, room=TokenRoom(num_tokens))
    assert num_tokens < raised.value.num_tokens <= len(whole)
    assert tokenizer.encode(text, room=TokenRoom(len(whole))) == whole
