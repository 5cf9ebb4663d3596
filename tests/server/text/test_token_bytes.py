import pytest
import tokenizers
from tokenizers import decoders, models

from tests.tokenizers_for_tests import byte_level, metaspace, sentencepiece, wordpiece
from weft.server.text.detokenizer import TokenTable, read_token_table


def _table(backend: tokenizers.Tokenizer, added: frozenset[str] = frozenset()) -> TokenTable:
    table = read_token_table(backend, added)
    assert table is not None
    return table


def test_byte_level_tokens_give_raw_bytes_for_all_256() -> None:
    backend = byte_level()
    bytes_of = _table(backend).bytes_of
    ids = backend.encode("😀").ids
    assert b"".join(bytes_of[token_id] for token_id in ids) == "😀".encode()
    single = {bytes_of[token_id] for token_id in range(backend.get_vocab_size())}
    assert {bytes([byte]) for byte in range(256)} <= single


def test_an_added_token_is_its_text_even_where_the_printable_alphabet_has_its_characters() -> None:
    """The decoder of `tokenizers` reads "é" in an added token as the byte 0xE9 and prints U+FFFD."""
    backend = byte_level()
    backend.add_tokens(["<é>"])
    token_id = backend.token_to_id("<é>")
    assert _table(backend, frozenset({"<é>"})).bytes_of[token_id] == "<é>".encode()


def test_sentencepiece_tokens_give_spaces_and_bytes() -> None:
    backend = sentencepiece()
    table = _table(backend)
    assert table.bytes_of[backend.token_to_id("▁the")] == b" the"
    assert table.bytes_of[backend.token_to_id("<0x0A>")] == b"\n"
    assert table.bytes_of[backend.token_to_id("<0xE4>")] == b"\xe4"
    assert table.num_leading_spaces == 1


def test_metaspace_cuts_the_first_tokens_spaces() -> None:
    assert _table(metaspace()).first_has_no_spaces


def test_an_id_outside_the_vocabulary_has_no_bytes_and_takes_no_room() -> None:
    bytes_of = _table(byte_level()).bytes_of
    assert bytes_of[10**6] == b""
    assert len(bytes_of) == 0


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]),
        decoders.Sequence([decoders.Metaspace(), decoders.Replace("▁", " ")]),
    ],
)
def test_a_decoder_of_another_design_is_no_table(decoder: object) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    if decoder is not None:
        backend.decoder = decoder
    assert read_token_table(backend, frozenset()) is None


def test_wordpiece_is_no_table() -> None:
    assert read_token_table(wordpiece(), frozenset()) is None
