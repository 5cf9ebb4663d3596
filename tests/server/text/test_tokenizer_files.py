"""Tokenizers that are no tokenizer.json, against the libraries that they belong to."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from llguidance import LLMatcher, LLTokenizer
from transformers import GPT2Tokenizer

from tests.tokenizers_for_tests import byte_level, training_text
from weft.engine.guidance.compiler import load_vocabulary
from weft.engine.wire import tokenizer_files
from weft.server.text.tokenizer import Tokenizer, TokenizerError

TEXTS = (
    *training_text()[:300:7],
    *(
        "Hello world",
        "  two  spaces ",
        "",
        "é中文 да\n\ttab",
        "def f(x): return [x, 12]",
        "😀 a\u00a0b",
    ),
)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def _streamed(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join(map(detokenizer.feed, token_ids)) + detokenizer.finish()


def _train(folder: Path, kind: str, **options: Any) -> sentencepiece.SentencePieceProcessor:
    lines = folder / "lines.txt"
    lines.write_text("\n".join(training_text()), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(lines),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=600,
        byte_fallback=True,
        user_defined_symbols=["<turn>"],
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


_LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bpe", _LLAMA),
        ("unigram", {**_LLAMA, "add_dummy_prefix": False}),
        ("unigram", {}),
    ],
    ids=["llama", "gemma", "nmt_nfkc"],
)
def test_a_sentencepiece_model_does_what_sentencepiece_does(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    reference = _train(tmp_path, kind, **options)
    tokenizer = Tokenizer.load(tmp_path)
    for text in TEXTS:
        token_ids = reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == token_ids, text
        assert tokenizer.decode(token_ids) == reference.decode(token_ids)
        assert _streamed(tokenizer, token_ids) == reference.decode(token_ids)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (reference.bos_id(), reference.eos_id())
    if options:
        vocabulary = load_vocabulary(tmp_path, 600, [reference.eos_id()]).vocabulary  # the engine's
        assert isinstance(vocabulary, LLTokenizer)
        matcher = LLMatcher(vocabulary, 'start: "true"')
        assert matcher.try_consume_tokens(tokenizer.encode_continuation("true")) > 0
        assert matcher.is_accepting()
        assert tokenizer.encode("a<turn>b") == [reference.bos_id(), *reference.encode("a<turn>b")]
    assert tokenizer.is_special(reference.eos_id())
    assert not tokenizer.is_special(reference.piece_to_id("<turn>"))


def test_what_is_made_is_kept_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _train(tmp_path, "bpe", **_LLAMA)
    made = tokenizer_files.tokenizer_folder(tmp_path)
    monkeypatch.setattr(subprocess, "run", None)
    assert tokenizer_files.tokenizer_folder(tmp_path) == made
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    with pytest.raises(TypeError):
        tokenizer_files.tokenizer_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "source.spm", "sentencepiece.bpe.model"])
def test_without_the_package_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """transformers asked for tiktoken."""
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"^this needs a package more: pip install 'weft\[sentencepiece\]'$"):
        tokenizer_files.convert(tmp_path, name)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(TokenizerError, match=r"^\S*/tokenizer.model: \S.*$"):
        Tokenizer.load(tmp_path)


def test_vocab_json_with_merges_txt(tmp_path: Path) -> None:
    byte_level(("<|endoftext|>",)).model.save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    reference = GPT2Tokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    for text in TEXTS:
        token_ids = reference.encode(text)
        assert tokenizer.encode(text) == token_ids, text
        assert _streamed(tokenizer, token_ids) == reference.decode(token_ids, clean_up_tokenization_spaces=False)
    assert tokenizer.eos_token_id == reference.eos_token_id
