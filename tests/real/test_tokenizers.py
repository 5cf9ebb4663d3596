"""Real tokenizers: ids of sentencepiece and of llama.cpp's test vectors, and streamed text that equals whole text."""

import json
import os
from pathlib import Path

import pytest
import sentencepiece

from tests.odd_lines import odd_lines
from tests.real import lines
from tests.real.llama_ids import digests as digest_of
from tests.real.mistral_ids import STORED
from weft.engine.gguf.file import read_model
from weft.engine.gguf.tokenizer import describe_tokenizer
from weft.engine.wire.bpe import convert_tekken
from weft.engine.wire.sentencepiece_model import convert_sentencepiece
from weft.server.text.tokenizer import Tokenizer

REAL = Path(os.environ.get("WEFT_REAL") or Path.home() / ".cache" / "weft-real")
pytestmark = [pytest.mark.real, pytest.mark.skipif(not REAL.is_dir(), reason=f"no real files in {REAL}")]


@pytest.mark.parametrize("file", sorted(REAL.glob("mistral/*.model*")), ids=lambda file: file.name)
def test_sentencepiece_models(file: Path) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_file=str(file))
    backend, _ = convert_sentencepiece(file, {})
    hidden = [piece for i in range(len(reference)) if reference.is_control(i) for piece in [reference.id_to_piece(i)]]
    for line in odd_lines():
        if not any(text in line for text in hidden):
            assert backend.encode(line, add_special_tokens=False).ids == reference.encode(line), line


@pytest.mark.parametrize("file", sorted(REAL.glob("mistral/tekken*.json")), ids=lambda file: file.name)
def test_tekken_files(file: Path) -> None:
    """mistral-common never takes text for a special token; Weft does, as chat templates write them."""
    backend, special = convert_tekken(file)
    assert special["bos_token"] == "<s>" and backend.get_vocab_size() == 131_072
    hidden = [token.content for token in backend.get_added_tokens_decoder().values()]
    digests = json.loads(STORED.read_text(encoding="utf-8"))[file.name].split()
    num_compared = 0
    for line, digest in zip(lines.odd_lines(), digests, strict=True):
        ids = backend.encode(line, add_special_tokens=False).ids
        assert backend.decode(ids, skip_special_tokens=False) == line
        if not any(text in line for text in hidden):
            assert digest_of([ids]) == digest, line
            num_compared += 1
    assert num_compared > 1_900


@pytest.mark.parametrize("folder", sorted(REAL.glob("tokenizers/*")), ids=lambda folder: folder.name)
def test_streamed_text_is_whole_text(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    for line in odd_lines():
        ids = tokenizer.encode(line, add_special_tokens=False)
        detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        streamed = "".join(map(detokenizer.feed, ids)) + detokenizer.finish()
        assert streamed == tokenizer._backend.decode(ids, skip_special_tokens=False), line


@pytest.mark.parametrize("file", sorted(REAL.glob("llama.cpp/*.gguf.inp")), ids=lambda file: file.name)
def test_vocabularies_of_llama_cpp(file: Path, tmp_path: Path) -> None:
    described = describe_tokenizer(read_model(file.with_suffix("")))
    for name, content in zip(("tokenizer.json", "tokenizer_config.json"), described, strict=True):
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    texts = file.read_text().split("\n__ggml_vocab_test__\n")
    expected = file.with_suffix(".out").read_text().splitlines()
    for text, ids in zip(texts, expected, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(token_id) for token_id in ids.split()], text
