"""Tokenizers from the metadata of GGUF files give the ids of those that the files were made of."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers

from tests import gguf_files
from tests.server.text.test_tokenizer_files import _LLAMA, _train
from tests.tokenizers_for_tests import byte_level, training_text
from weft.engine.gguf.file import GgufError, GgufModel, read_model
from weft.engine.gguf.tokenizer import describe_tokenizer
from weft.server.text.tokenizer import Tokenizer

TEXTS = (
    *training_text()[:40],
    *(
        "",
        " ",
        "  two  spaces ",
        "12345 678",
        "1.5e-3\n\n\tx",
        "naïve café",
        "日本語 🙂",
        "it's I'LL",
        "a\u0301 e\u0301",
    ),
    *("<|im_start|>user\nhi<|im_end|>", "<think>  so</think>\n", "x<turn> y", "<s>a</s>"),
)


def model_of(folder: Path, write: Any) -> GgufModel:
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    write(writer)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_model(folder / "model.gguf")


def load(folder: Path, model: GgufModel) -> Tokenizer:
    for name, content in zip(("tokenizer.json", "tokenizer_config.json"), describe_tokenizer(model), strict=True):
        (folder / name).write_text(json.dumps(content))
    return Tokenizer.load(folder)


def splitting(*steps: pre_tokenizers.PreTokenizer, whole_first: bool = False) -> tokenizers.Tokenizer:
    content = json.loads(byte_level().to_str())
    content["model"]["ignore_merges"] = whole_first
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<turn>", special=False, normalized=False)])
    return backend


def qwen2() -> tokenizers.Tokenizer:
    content = json.loads(byte_level().to_str())
    return tokenizers.Tokenizer.from_str(json.dumps(content | {"normalizer": {"type": "NFC"}}))


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BACKENDS = {
    "qwen2": qwen2,
    "llama-bpe": lambda: splitting(pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES, whole_first=True),
    "smollm": lambda: splitting(
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    ),
    "gpt-2": lambda: splitting(pre_tokenizers.ByteLevel(add_prefix_space=False)),
}


@pytest.mark.parametrize("pre", BACKENDS)
def test_byte_level(tmp_path: Path, pre: str) -> None:
    backend = BACKENDS[pre]()
    model = model_of(tmp_path, lambda w: gguf_files.add_tokenizer(w, json.loads(backend.to_str()), pre))
    tokenizer = load(tmp_path, model)
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == backend.decode(ids)


TEXT = "It's 1234, 你好!\n\n x"
DIGITS = ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("midm-2.0", ["It", "'s", " ", "123", "4", ",", " 你好", "!\n\n", " x"]),
        ("minicpm5", ["It", "'s", " ", "123", "4", ",", " 你好", "!\n\n", " x"]),
        ("seed-coder", ["It", "'s", " ", *DIGITS, ",", " 你好", "!", "\n\n", " x"]),
        ("deepseek-coder", ["It", "'", "s", " ", *DIGITS, ",", " ", "你好", "!", "\n", "\n", " x"]),
        ("viking", ["It's", " ", *DIGITS, ",", " 你好", "!\n\n", " x"]),
        ("qwen35", ["It", "'s", " ", *DIGITS, ",", " 你好", "!\n\n", " x"]),
        ("deepseek-llm", ["It", "'", "s", " ", "1234", ",", " ", "你好", "!", "\n", "\n", " x"]),
        ("falcon", ["It", "'", "s", " ", "123", "4", ",", " 你好", "!", "\n\n", " x"]),
        ("default", ["It", "'", "s", " ", "123", "4", ",", " 你好", "!", "\n\n", " x"]),
        ("", ["It", "'", "s", " ", "123", "4", ",", " 你好", "!", "\n\n", " x"]),
        ("minerva-7b", ["It", "'s", " ", *DIGITS, ",", " 你好", "!", "\n\n", " x"]),
        *((name, ["It", "'s", " 1234", ",", " 你好", "!", "\n\n", " x"]) for name in ("trillion", "mellum", "a.x-4.0")),
    ],
)
def test_how_text_is_split(pre: str, pieces: list[str]) -> None:
    """Files with these names were refused."""
    values = {"model": "gpt2", "pre": pre, "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    described, _ = describe_tokenizer(GgufModel((), {f"tokenizer.ggml.{key}": values[key] for key in values}, {}))
    splitter = tokenizers.Tokenizer.from_str(json.dumps(described)).pre_tokenizer
    assert splitter is not None
    assert [TEXT[start:end] for _, (start, end) in splitter.pre_tokenize_str(TEXT)] == pieces


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece(tmp_path: Path, has_prefix: bool) -> None:
    own = _train(tmp_path, "bpe", **_LLAMA, add_dummy_prefix=has_prefix)
    kinds = (own.IsUnknown, 2), (own.IsControl, 3), (own.IsByte, 6)
    types = [next((kind for has, kind in kinds if has(i)), 1) for i in range(own.vocab_size())]
    types[own.piece_to_id("<turn>")] = gguf.TokenType.USER_DEFINED

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([own.id_to_piece(i) for i in range(own.vocab_size())])
        writer.add_token_scores([own.get_score(i) for i in range(own.vocab_size())])
        writer.add_token_types(types)
        writer.add_add_space_prefix(has_prefix)
        for name, index in (("bos", own.bos_id()), ("eos", own.eos_id()), ("unk", own.unk_id())):
            getattr(writer, f"add_{name}_token_id")(index)

    tokenizer = load(tmp_path, model_of(tmp_path, write))
    for text in TEXTS:
        if "<s>" in text:  # a control token, which sentencepiece never makes of text
            continue
        ids = own.encode(text)
        if "<turn>" not in text or not has_prefix:  # behind it llama.cpp adds a prefix, too
            assert tokenizer.encode(text) == [own.bos_id(), *ids]
        assert tokenizer.decode(ids) == own.decode(ids)


@pytest.mark.parametrize(("architecture", "behind"), [("phi3", []), ("llama", [4])])
def test_tokens_of_phi_3_take_the_white_space_behind_them(tmp_path: Path, architecture: str, behind: list[int]) -> None:
    """Each line break behind <|user|> was a token that the model had not been trained with."""
    values = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "<|user|>", "a", "\n"],
        "token_type": [2, 3, 3, 1, 1],
        "scores": [0.0] * 5,
        "add_bos_token": False,
        "add_space_prefix": False,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    tokenizer = load(tmp_path, GgufModel((), {"general.architecture": architecture, **metadata}, {}))  # type: ignore[arg-type]
    assert tokenizer.encode("<|user|>\na") == [2, *behind, 3]
    assert tokenizer.encode("<s>\na") == [1, 4, 3]


def test_wordpiece(tmp_path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁ring", "s", "▁the", "▁!", "▁e"]
    values = {"model": "bert", "tokens": tokens, "token_type": [3, 2, 3, 3, 1, 1, 1, 1, 1], "cls_token_id": 2}
    values |= {"seperator_token_id": 3, "unknown_token_id": 1}
    tokenizer = load(tmp_path, GgufModel((), {f"tokenizer.ggml.{key}": value for key, value in values.items()}, {}))  # type: ignore[misc]
    assert tokenizer.encode("The RINGS! s É") == [2, 6, 4, 5, 7, 1, 8, 3]
    assert tokenizer.encode_pair("the", "ring") == ([2, 6, 3, 4, 3], [0, 0, 0, 1, 1])


@pytest.mark.parametrize("squeezes", [True, False])
def test_unigram(tmp_path: Path, squeezes: bool) -> None:
    own = _train(tmp_path, "unigram", **(_LLAMA | {"remove_extra_whitespaces": squeezes}))
    kinds = (own.IsUnknown, 2), (own.IsControl, 3), (own.IsByte, 6)
    types = [next((kind for has, kind in kinds if has(i)), 1) for i in range(own.vocab_size())]
    types[own.piece_to_id("<turn>")] = 4
    values = {"model": "t5", "tokens": [own.id_to_piece(i) for i in range(own.vocab_size())], "token_type": types}
    values |= {"scores": [own.get_score(i) for i in range(own.vocab_size())], "add_space_prefix": True}
    values |= {"unknown_token_id": own.unk_id(), "eos_token_id": 2, "remove_extra_whitespaces": squeezes}
    tokenizer = load(tmp_path, GgufModel((), {f"tokenizer.ggml.{key}": value for key, value in values.items()}, {}))  # type: ignore[misc]
    for text in TEXTS:
        if "<s>" not in text and "<turn>" not in text:
            assert tokenizer.encode(text) == [*own.encode(text), 2], text


def test_gemma4(tmp_path: Path) -> None:
    tokens = ["<pad>", "<unk>", "<0x0A>", "<0xC3>", "<0xA9>", "▁", "a", "▁a", "\n", "\n\n", "▁▁"]
    values = {
        "model": "gemma4",
        "tokens": tokens,
        "token_type": [3, 2, 6, 6, 6, 1, 1, 1, 1, 1, 1],
        "unknown_token_id": 1,
    }
    values |= {"merges": ["▁ ▁", "▁ a", "\n \n"]}
    tokenizer = load(tmp_path, GgufModel((), {f"tokenizer.ggml.{key}": value for key, value in values.items()}, {}))  # type: ignore[misc]
    assert tokenizer.encode("a a  é\n\n\na") == [6, 7, 10, 3, 4, 9, 8, 6]
    assert tokenizer.decode([6, 7, 10, 3, 4, 9]) == "a a  é\n\n"


def test_a_long_piece_does_not_delay_the_start() -> None:
    """Every place in a piece of a million characters was tried, which took the time of their square."""
    tokens = ["a", "aa", "a" * 512, "a" * 1_000_000]
    values = {"model": "llama", "tokens": tokens, "token_type": [1] * 4, "scores": [-1.0, -2.0, -3.0, -4.0]}
    described = describe_tokenizer(GgufModel((), {f"tokenizer.ggml.{key}": values[key] for key in values}, {}))[0]
    assert described["model"]["merges"] == [["a", "a"]]  # type: ignore[index]


def test_templates_and_what_stands_around_a_prompt(tmp_path: Path) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        gguf_files.add_tokenizer(writer, json.loads(byte_level().to_str()))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(True)
        writer.add_chat_template(
            [{"name": "default", "template": "{{ bos_token }}A"}, {"name": "tool_use", "template": "B"}]
        )

    tokenizer = load(tmp_path, model_of(tmp_path, write))
    plain = byte_level()
    assert tokenizer.encode("a b") == [1, *plain.encode("a b").ids]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert describe_tokenizer(read_model(tmp_path / "model.gguf"))[1]["chat_template"] == [
        {"name": "default", "template": "{{ bos_token }}A"},
        {"name": "tool_use", "template": "B"},
    ]


@pytest.mark.parametrize(("pre", "given", "first"), [("tekken", None, [1]), ("tekken", False, []), ("qwen2", None, [])])
def test_how_a_prompt_begins(tmp_path: Path, pre: str, given: bool | None, first: list[int]) -> None:
    """Files of Llama 3 often say nothing of it."""

    def write(writer: gguf.GGUFWriter) -> None:
        gguf_files.add_tokenizer(writer, json.loads(byte_level().to_str()), pre)
        writer.add_bos_token_id(1)
        if given is not None:
            writer.add_add_bos_token(given)

    assert load(tmp_path, model_of(tmp_path, write)).encode("ab") == [*first, *byte_level().encode("ab").ids]


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizers of kind rwkv are not supported (supported: gpt2, llama, gemma4"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.cls_token_id is None, and there are 3 tokens"),
        ({"tokenizer.ggml.model": "t5"}, "0 scores in tokenizer.ggml.scores for 3 tokens"),
        ({"tokenizer.ggml.model": "none"}, "tokenizers of kind none are not"),
        ({"tokenizer.ggml.tokens": []}, "the file has no tokenizer ("),
        ({"tokenizer.ggml.tokens": [1]}, "tokenizer.ggml.tokens must be a list of type str"),
        ({"tokenizer.ggml.pre": "other"}, "tokenizer.ggml.pre is other, which is not supported (supported: llama"),
        ({"tokenizer.ggml.merges": []}, "the tokenizer has no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "merge 'a zz' in tokenizer.ggml.merges is not one of two tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "1 types in tokenizer.ggml.token_type for 3 tokens"),
        ({"tokenizer.ggml.model": "llama"}, "0 scores in tokenizer.ggml.scores for 3 tokens"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [f"{i:0512}" for i in range(20_000)]}
            | {"tokenizer.ggml.token_type": [1] * 20_000, "tokenizer.ggml.scores": [0.0] * 20_000},
            "tokenizer.ggml.tokens has 10,240,000 characters, at most 8,388,608 are supported",
        ),
        ({"tokenizer.ggml.add_bos_token": 3}, "tokenizer.ggml.add_bos_token must be of type bool, got '3'"),
    ],
)
def test_faults_are_one_line(values: dict[str, Any], fault: str) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": [1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
    }
    with pytest.raises(GgufError) as caught:
        describe_tokenizer(GgufModel((), metadata | values, {}))
    assert str(caught.value).startswith(fault) and "\n" not in str(caught.value)
