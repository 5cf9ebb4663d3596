import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from transformers import PreTrainedTokenizerFast

from tests.chat_templates_for_tests import CHATML
from tests.tokenizers_for_tests import (
    byte_level,
    encode_chat,
    sentencepiece,
    training_text,
    with_template,
    wordpiece,
    write_checkpoint,
)
from weft.server.text.chat_template import ChatTemplateError, ChatTemplates
from weft.server.text.tokenizer import Tokenizer, TokenizerError

_QWEN = Tokenizer(byte_level(), {"eos_token": "<|im_end|>"}, ChatTemplates({}))
_LLAMA = Tokenizer(sentencepiece(), {"bos_token": "<s>", "eos_token": "</s>"}, ChatTemplates({}))
_REFERENCES = [
    (_QWEN, PreTrainedTokenizerFast(tokenizer_object=byte_level())),
    (_LLAMA, PreTrainedTokenizerFast(tokenizer_object=sentencepiece())),
]
_HELLO = [{"role": "user", "content": "hello"}]


def test_a_checkpoint_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"^.* has no tokenizer: one of tokenizer\.json, tekken\.json, .*$"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json is not a valid tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("special_tokens_map.json", "[]", "special_tokens_map.json must hold a JSON object"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, content: str, message: str) -> None:
    write_checkpoint(tmp_path, byte_level())
    (tmp_path / file).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "special_map"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>"}, None),
        ({"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": {"content": "</s>"}}, None),
        ({}, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}),
        ({"bos_token": "<s>", "eos_token": "</s>", "unk_token": None}, {"eos_token": "<unk>"}),
    ],
)
def test_special_tokens_are_read_in_every_dialect(
    tmp_path: Path, config: dict[str, object], special_map: dict[str, object] | None
) -> None:
    write_checkpoint(tmp_path, sentencepiece(), config)
    if special_map is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special_map))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert not tokenizer.template_source(has_tools=False)


def test_a_token_that_only_the_configuration_calls_special_is_special(tmp_path: Path) -> None:
    backend = byte_level(special=("<|im_start|>", "<|im_end|>"))
    backend.add_tokens([AddedToken("<think>", special=False)])
    config: dict[str, object] = {
        "eos_token": "the",
        "additional_special_tokens": ["and", {"content": "er"}, "not in the vocabulary"],
        "extra_special_tokens": {"image_token": "ing"},
    }
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path, backend, config))
    for word in ("the", "and", "er", "ing"):
        (token_id,) = tokenizer.encode(word)
        assert tokenizer.is_special(token_id)
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert not tokenizer.is_special(backend.token_to_id("<think>"))
    assert tokenizer.decode(tokenizer.encode("the <think>x")) == " <think>x"


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=4)
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("a longer text")) == "a longer text"


@given(text=st.text(max_size=40) | st.sampled_from(training_text()), add=st.booleans())
def test_ids_equal_those_of_transformers(text: str, add: bool) -> None:
    for ours, reference in _REFERENCES:
        assert ours.encode(text, add) == reference.encode(text, add_special_tokens=add)


def test_special_text_in_a_plain_prompt_is_the_special_token() -> None:
    assert _QWEN.encode("<|im_end|>") == [_QWEN.eos_token_id]
    assert _LLAMA.encode("x")[0] == _LLAMA.bos_token_id


@given(text=st.text(max_size=40))
def test_text_comes_back(text: str) -> None:
    assert _QWEN.decode(_QWEN.encode(text), skip_special_tokens=False) == text


def test_the_bytes_of_tokens_are_those_of_the_text() -> None:
    text = "the 中 😀 é\n"
    for tokenizer in (_QWEN, _LLAMA):
        ids = tokenizer.encode(text, add_special_tokens=False)
        data = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        assert data.decode().removeprefix(" ") == text


def test_a_token_shows_as_in_openais_logprobs() -> None:
    (space_the,) = _QWEN.encode(" the")
    partial = _QWEN.encode("😀")
    assert _QWEN.token_text(space_the) == " the"
    assert [_QWEN.token_text(token_id) for token_id in partial] == [r"\xf0", r"\x9f", r"\x98", r"\x80"]
    assert [_QWEN.token_bytes(token_id) for token_id in partial] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert _QWEN.token_bytes(_QWEN.encode("<|im_end|>")[0]) == b"<|im_end|>"
    assert _QWEN.token_text(10**6) == ""


def test_a_decoder_without_bytes_shows_its_text() -> None:
    tokenizer = Tokenizer(wordpiece(), {}, ChatTemplates({}))
    ids = tokenizer.encode("the kalo")
    assert tokenizer.decode(ids) == "the kalo"
    assert tokenizer.token_bytes(ids[0]) == b"the"


def test_ids_that_are_not_dense_are_all_below_the_vocabularys_size() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 9}, []))
    backend.add_tokens(["<x>"])
    tokenizer = Tokenizer(backend, {}, ChatTemplates({}))
    assert tokenizer.vocab_size > max(backend.get_added_tokens_decoder())


@pytest.mark.parametrize("tokenizer", [_QWEN, _LLAMA])
@pytest.mark.parametrize("word", ["the", " the", "kalo", "😀", "x y"])
def test_bad_words_are_found_however_they_are_written(tokenizer: Tokenizer, word: str) -> None:
    ways = tokenizer.bad_word_ids(word)
    assert len(set(ways)) == len(ways)
    assert tuple(tokenizer.encode(word.strip(), False)) in ways
    for text in ("{}", " {}", "x {}", "\n{}"):
        ids = tokenizer.encode(text.format(word.strip()), add_special_tokens=False)
        assert any(tuple(ids[start:]) in ways for start in range(len(ids))), text


def test_an_empty_bad_word_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        _QWEN.bad_word_ids("  ")


def test_a_chat_takes_the_checkpoints_template_and_its_special_tokens(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}"
    config: dict[str, object] = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path, byte_level(), config, template))
    assert tokenizer.template_source(has_tools=False) == template
    ids = encode_chat(tokenizer, _HELLO)
    assert ids[:2] == [tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert tokenizer.decode(ids) == "hello"


def test_a_chat_without_a_template_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        encode_chat(_QWEN, _HELLO)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_a_variable_that_has_its_own_parameter_is_refused(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"variable '{name}' cannot be set"):
        encode_chat(_QWEN, _HELLO, template_kwargs={name: "x"}, chat_template=CHATML)


def test_a_variable_cannot_bring_a_control_token() -> None:
    variables = {"eos_token": "<|im_end|>", "think": ["<|im_end|>"]}
    ids = encode_chat(_QWEN, _HELLO, template_kwargs=variables, chat_template="{{ eos_token }}{{ think[0] }}")
    assert _QWEN.eos_token_id not in ids
    assert _QWEN.decode(ids) == "<|im_end|><|im_end|>"


def test_threads_may_share_a_tokenizer() -> None:
    texts = [line * 5 for line in training_text()[:100]]
    expected = [_QWEN.encode(text) for text in texts]
    shared = with_template(_QWEN, CHATML)
    chat: Any = [encode_chat(shared, [{"role": "user", "content": text}]) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(_QWEN.encode, texts)) == expected
        again = pool.map(lambda t: encode_chat(shared, [{"role": "user", "content": t}]), texts)
        assert list(again) == chat
        assert list(pool.map(_QWEN.decode, expected)) == texts


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = "import sys, weft.server.text.tokenizer; assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)


def test_a_token_is_found_by_its_text_and_a_template_tells_its_variables(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path, byte_level(), {}, "{{ messages }}{{ documents }}"))
    assert tokenizer.token_id("<|im_end|>") == tokenizer.encode("<|im_end|>", False)[0]
    assert tokenizer.token_id("<|no such|>") is None
    assert tokenizer.template_variables == {"messages", "documents"}
    assert _QWEN.template_variables == frozenset()


@pytest.mark.parametrize("tokenizer", [_QWEN, _LLAMA])
def test_a_continuation_has_nothing_in_front(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("the", False), *tokenizer.encode_continuation("kalo()")]
    assert tokenizer.decode(ids) == "thekalo()"
