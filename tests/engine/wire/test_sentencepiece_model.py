"""Models of SentencePiece, in more forms than checkpoints have, give SentencePiece's own ids or are refused."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as formats

from tests.odd_lines import odd_lines
from tests.tokenizers_for_tests import training_text
from weft.engine.wire.sentencepiece_model import InexactError, convert_sentencepiece

DEFINED = ["<turn>", "▁▁", "\n\n", "a.b|c", "[X]"]
AROUND = ["a<turn>b", " <turn> x", "a  <turn><turn>  b", "x\n\n\ny", "a.b|c a.b c", "[X]<0x41>[X]", "<turn><unk><turn>"]


def train(folder: Path, kind: str, **options: Any) -> sentencepiece.SentencePieceProcessor:
    lines = folder / "lines.txt"
    lines.write_text("\n".join([*training_text()[::2], *(line for line in odd_lines() if len(line) < 300)]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(lines),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        **{"vocab_size": 1500, "character_coverage": 0.98, "hard_vocab_limit": False, "minloglevel": 2} | options,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def check(folder: Path, reference: sentencepiece.SentencePieceProcessor, kind: str, more: Iterable[str] = ()) -> None:
    """Of a unigram model texts may be cut in another order of equal pieces: both have the same probability."""
    backend, _ = convert_sentencepiece(folder / "tokenizer.model", {})
    in_order: Callable[[list[int]], list[int]] = sorted if kind == "unigram" else list
    for line in (*odd_lines(), *more):
        if "<s>" not in line and "</s>" not in line:  # control tokens, which sentencepiece never makes of text
            ids = backend.encode(line, add_special_tokens=False).ids
            assert in_order(ids) == in_order(reference.encode(line)), line
            if reference.unk_id() not in ids:  # which has another name in texts
                assert backend.decode(ids) == reference.decode(ids)


FORMS = list(itertools.product(("bpe", "unigram"), (False, True), (True, False), (True, False)))


@pytest.mark.parametrize(("kind", "squeezes", "has_prefix", "by_bytes"), FORMS)
def test_identity(tmp_path: Path, kind: str, squeezes: bool, has_prefix: bool, by_bytes: bool) -> None:
    """Merges went by id, so runs of spaces were others: a third of all lines of code and tables."""
    options = {"remove_extra_whitespaces": squeezes, "add_dummy_prefix": has_prefix, "byte_fallback": by_bytes}
    options |= {"allow_whitespace_only_pieces": not squeezes, "normalization_rule_name": "identity"}
    check(tmp_path, train(tmp_path, kind, **options), kind)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char"])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_pieces_that_users_defined(tmp_path: Path, kind: str, has_prefix: bool) -> None:
    """They were tokens beside the model: what came before and after them was encoded as a text of its own."""
    defined = DEFINED if kind != "unigram" else [DEFINED[0], *DEFINED[2:]]
    options = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity", "byte_fallback": True}
    options |= {"user_defined_symbols": defined, "add_dummy_prefix": has_prefix, "allow_whitespace_only_pieces": True}
    check(tmp_path, train(tmp_path, kind, **options), kind, AROUND)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_nmt_nfkc(tmp_path: Path, kind: str, has_prefix: bool) -> None:
    check(tmp_path, train(tmp_path, kind, add_dummy_prefix=has_prefix), kind)


@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        ("bpe", {"normalization_rule_name": "nfkc_cf"}, "'A\u030a n"),  # the library cuts what it composes
        ("bpe", {"remove_extra_whitespaces": False}, r"'\\r\\n x\\r\\n'"),
        ("unigram", {"user_defined_symbols": ["\uff21"]}, "'[^']*\uff21"),  # which the library would normalize
    ],
)
def test_what_would_differ_is_refused_with_a_line_that_does(
    tmp_path: Path, kind: str, options: dict[str, Any], line: str
) -> None:
    train(tmp_path, kind, **options)
    with pytest.raises(InexactError, match=f"^the model cannot be converted exactly: (?:{line})"):
        convert_sentencepiece(tmp_path / "tokenizer.model", {})


def _changed(name: str) -> Callable[[Any], None]:
    def change(proto: Any) -> None:
        if name == "denormalizer":
            proto.denormalizer_spec.precompiled_charsmap = b"x"
        elif name == "unused":
            proto.pieces[300].type = 5
        elif name == "suffix":
            proto.trainer_spec.treat_whitespace_as_suffix = True
        else:
            proto.normalizer_spec.escape_whitespaces = False

    return change


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("denormalizer", "a denormalizer"),
        ("unused", "unused pieces in BPE"),
        ("suffix", r"spaces as suffixes \(treat_whitespace_as_suffix\)"),
        ("plain", r"spaces that stay spaces \(escape_whitespaces false\)"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, name: str, fault: str) -> None:
    train(tmp_path, "bpe")
    file = tmp_path / "tokenizer.model"
    proto = formats.ModelProto.FromString(file.read_bytes())
    _changed(name)(proto)
    file.write_bytes(proto.SerializeToString())
    with pytest.raises(InexactError, match=f"^SentencePiece with {fault} is not supported; the model needs a"):
        convert_sentencepiece(file, {})


def test_words_are_refused(tmp_path: Path) -> None:
    train(tmp_path, "word")
    with pytest.raises(InexactError, match=r"^SentencePiece with models of type word is"):
        convert_sentencepiece(tmp_path / "tokenizer.model", {})
