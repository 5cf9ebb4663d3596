"""Tokenizers that transformers has in Python alone give its ids for odd lines, or are refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer

from tests.engine.wire.test_sentencepiece_model import train
from tests.odd_lines import odd_lines
from weft.engine.wire.python_tokenizer import convert_python_tokenizer
from weft.engine.wire.sentencepiece_model import InexactError
from weft.server.text.tokenizer import Tokenizer

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
ANSWERS = ["▁Größe", "Wörter", "▁ganz", "zwölf", "▁jäh"]
ONE_MODEL = ["sentencepiece.bpe.model"]
KINDS = [
    ("unigram", "MarianTokenizer", "marian", ["source.spm", "target.spm"]),
    ("bpe", "M2M100Tokenizer", "m2m_100", ONE_MODEL),
    ("unigram", "M2M100Tokenizer", "m2m_100", ONE_MODEL),
    ("bpe", "PLBartTokenizer", "plbart", ONE_MODEL),
    ("unigram", "Speech2TextTokenizer", "speech_to_text", ONE_MODEL),
]


def write(folder: Path, kind: str, name: str, model_type: str, files: Sequence[str], left_out: int = 0) -> Any:
    """Write the files of such a tokenizer as its checkpoints have them, and load it with transformers.

    Args:
        left_out: Of the model's pieces, from the end, that get no id.
    """
    pieces: dict[str, None] = {}
    for file in files:
        own = {"user_defined_symbols": ANSWERS} if file == "target.spm" else {}
        model: sentencepiece.SentencePieceProcessor = train(folder, kind, **own)
        (folder / "tokenizer.model").rename(folder / file)
        ids = range(3, model.get_piece_size() - left_out)
        pieces |= dict.fromkeys(model.id_to_piece(piece_id) for piece_id in ids)
    texts = [*SPECIAL, *sorted(pieces, key=lambda piece: (len(piece), piece))]
    texts += [">>fra<<", ">>deu<<"] if model_type == "marian" else []
    (folder / "vocab.json").write_text(json.dumps({text: index for index, text in enumerate(texts)}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.mark.filterwarnings("ignore:Recommended")
@pytest.mark.parametrize(("kind", "name", "model_type", "files"), KINDS)
def test_ids_equal_those_of_transformers(
    tmp_path: Path, kind: str, name: str, model_type: str, files: list[str]
) -> None:
    """Marian and M2M100 were refused, for they come without a tokenizer.json."""
    reference = write(tmp_path, kind, name, model_type, files)
    backend = convert_python_tokenizer(reference)
    in_order = list if kind == "bpe" else sorted
    lines = [*odd_lines(), ">>fra<< Good morning.", "a\ufdd0 ganz"]
    for line in lines:
        ids, expected = backend.encode(line).ids, reference(line).input_ids
        assert in_order(ids) == in_order(expected), line
        if reference.unk_token_id not in ids and model_type in ("marian", "speech_to_text"):
            assert backend.decode(ids) == reference.decode(expected, skip_special_tokens=True), line


@pytest.mark.filterwarnings("ignore:Recommended")
def test_a_checkpoint_without_tokenizer_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by its files, converted in a child, and read: also pieces that only answers have."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reference = write(tmp_path, *KINDS[0])
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("Good morning.") == reference("Good morning.").input_ids
    ids = reference.convert_tokens_to_ids(ANSWERS)
    written = tokenizer.detokenizer()
    streamed = "".join(map(written.feed, ids)) + written.finish()
    assert streamed == tokenizer.decode(ids) == reference.decode(ids) == "GrößeWörter ganzzwölf jäh"
    assert set(tokenizer.encode("ganz")).isdisjoint(ids)


@pytest.mark.filterwarnings("ignore:Recommended")
def test_pieces_without_an_id(tmp_path: Path) -> None:
    """Of probable pieces others are made; merges cannot do without."""
    reference = write(tmp_path, *KINDS[0], left_out=5)
    line = "The answer is 42."
    assert sorted(convert_python_tokenizer(reference).encode(line).ids) == sorted(reference(line).input_ids)
    (tmp_path / "other").mkdir()
    with pytest.raises(InexactError, match=r"^\d+ of \d+ pieces of the model have no id in its vocab.json$"):
        convert_python_tokenizer(write(tmp_path / "other", *KINDS[0], left_out=400))
    folder = tmp_path / "merges"
    folder.mkdir()
    with pytest.raises(InexactError, match=r"^the piece '.*' of the model has no id$"):
        convert_python_tokenizer(write(folder, *KINDS[1], left_out=5))


@pytest.mark.filterwarnings("ignore:Recommended")
@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ({"separate_vocabs": True}, "a vocabulary for inputs and another one for answers are not supported"),
        ({"do_lower_case": True}, "do_upper_case and do_lower_case are not supported"),
        ({"spm_files": [], "vocab_file": "vocab.txt"}, "MarianTokenizer is not supported; the model needs a"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, setting: dict[str, Any], fault: str) -> None:
    reference = write(tmp_path, *KINDS[0])
    for name, value in setting.items():
        setattr(reference, name, value)
    with pytest.raises(InexactError, match=f"^{fault}"):
        convert_python_tokenizer(reference)


def test_a_model_without_tokenizer_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mT5 comes with a SentencePiece model of another name alone, and was refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    train(tmp_path, "unigram", unk_id=2, bos_id=-1, eos_id=1, pad_id=0)
    (tmp_path / "tokenizer.model").rename(tmp_path / "spiece.model")
    (tmp_path / "config.json").write_text('{"model_type": "mt5"}')
    reference = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    tokenizer = Tokenizer.load(tmp_path)
    for line in odd_lines():
        assert tokenizer.encode(line) == reference(line).input_ids, line
