import functools
import re

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizers_for_tests import byte_level, metaspace, sentencepiece, wordpiece
from weft.server.generate.choice_stream import Detokenizer
from weft.server.text.detokenizer import BytesDetokenizer, WindowDetokenizer, read_token_table

_BUILDERS = {"byte_level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace, "wordpiece": wordpiece}
_BYTE_TOKEN = re.compile(r"<0x..>")


@functools.cache
def _backend(name: str) -> tokenizers.Tokenizer:
    return _BUILDERS[name]()


def _special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


def _detokenizer(name: str, skip_special_tokens: bool = True) -> Detokenizer:
    backend = _backend(name)
    skipped = _special_ids(backend) if skip_special_tokens else frozenset()
    table = read_token_table(backend, frozenset(t.content for t in backend.get_added_tokens_decoder().values()))
    return WindowDetokenizer(backend, skipped) if table is None else BytesDetokenizer(table, skipped)


def _pieces(name: str, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = _detokenizer(name, skip)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "wordpiece"])
@given(data=st.data(), skip=st.booleans())
def test_random_ids_give_what_the_library_decodes(name: str, data: st.DataObject, skip: bool) -> None:
    size = _backend(name).get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 2), max_size=40))
    assert "".join(_pieces(name, ids, skip)) == _backend(name).decode(ids, skip_special_tokens=skip)


@given(data=st.data(), skip=st.booleans())
def test_random_sentencepiece_ids_give_what_the_library_decodes(data: st.DataObject, skip: bool) -> None:
    """Runs of byte tokens are whole characters here; the library turns any other run into U+FFFD."""
    backend = _backend("sentencepiece")
    texts = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    plain = st.sampled_from([i for i, text in enumerate(texts) if not _BYTE_TOKEN.fullmatch(text)]).map(lambda i: [i])
    char = st.characters(codec="utf-8").map(lambda c: [backend.token_to_id(f"<0x{b:02X}>") for b in c.encode()])
    ids = [token_id for run in data.draw(st.lists(plain | char, max_size=30)) for token_id in run]
    assert "".join(_pieces("sentencepiece", ids, skip)) == backend.decode(ids, skip_special_tokens=skip)


@given(data=st.binary(max_size=30))
def test_sentencepiece_bytes_decode_as_utf8_with_replacement(data: bytes) -> None:
    backend = _backend("sentencepiece")
    ids = [backend.token_to_id("▁the"), *(backend.token_to_id(f"<0x{byte:02X}>") for byte in data)]
    assert "".join(_pieces("sentencepiece", ids)) == "the" + data.decode("utf-8", "replace")


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@given(text=st.text(max_size=30))
def test_encoded_text_comes_back_without_a_broken_character(name: str, text: str) -> None:
    ids = _backend(name).encode(text, add_special_tokens=False).ids
    pieces = _pieces(name, ids, skip=False)
    expected = _backend(name).decode(ids, skip_special_tokens=False)
    assert "".join(pieces) == expected
    if "\ufffd" not in expected:
        assert not any("\ufffd" in piece for piece in pieces)


@given(data=st.binary(max_size=40))
def test_no_more_than_three_bytes_are_ever_held(data: bytes) -> None:
    """The text always lags by less than one character."""
    backend = _backend("byte_level")
    byte_ids = {bytes([b]): backend.token_to_id(token) for b, token in _byte_tokens().items()}
    detokenizer = _detokenizer("byte_level")
    text = ""
    for i in range(len(data)):
        text += detokenizer.feed(byte_ids[data[i : i + 1]])
        assert any(text == data[: i + 1 - held].decode("utf-8", "replace") for held in range(min(4, i + 2)))


def _byte_tokens() -> dict[int, str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}


def test_an_incomplete_character_is_held_and_an_invalid_byte_is_not() -> None:
    tokens = _byte_tokens()
    ids = [_backend("byte_level").token_to_id(tokens[byte]) for byte in (*"é".encode(), 0xFF, 0xF0, 0x9F, 0x41, 0xE4)]
    assert _pieces("byte_level", ids) == ["", "é", "\ufffd", "", "", "\ufffdA", "", "\ufffd"]


def test_a_skipped_special_token_does_not_end_a_character() -> None:
    backend = _backend("byte_level")
    first, second = (backend.token_to_id(_byte_tokens()[byte]) for byte in "é".encode())
    special = backend.token_to_id("<|im_end|>")
    assert _pieces("byte_level", [first, special, second]) == ["", "", "é", ""]
    assert _pieces("byte_level", [first, special, second], skip=False) == ["", "\ufffd<|im_end|>", "\ufffd", ""]


def test_only_the_texts_first_space_is_cut() -> None:
    backend = _backend("sentencepiece")
    space, the = backend.token_to_id("▁"), backend.token_to_id("▁the")
    assert _pieces("sentencepiece", [space, the, the]) == ["", " the", " the", ""]
