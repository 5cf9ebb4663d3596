from typing import Any

import pytest

from tests.server.conftest import BOS

QWEN = {"<|fim_prefix|>": 260, "<|fim_suffix|>": 261, "<|fim_middle|>": 262, "<|endoftext|>": 263}
DEEPSEEK = {"<｜fim▁begin｜>": 260, "<｜fim▁hole｜>": 261, "<｜fim▁end｜>": 262}  # noqa: RUF001
CODE_LLAMA = {"▁<PRE>": 260, "▁<SUF>": 261, "▁<MID>": 262, "▁<EOT>": 263}
STARCODER = {"<fim_prefix>": 260, "<fim_suffix>": 261, "<fim_middle>": 262, "<|endoftext|>": 263}
CODESTRAL = {"[SUFFIX]": 261, "[PREFIX]": 260}
SEED = {"<[fim-suffix]>": 261, "<[fim-prefix]>": 260, "<[fim-middle]>": 262}

PREFIX_FIRST = [BOS, 260, *b"ab", 261, *b"yz", 262]


@pytest.mark.parametrize(
    ("vocabulary", "prompt"),
    [
        (QWEN, PREFIX_FIRST),
        (DEEPSEEK, PREFIX_FIRST),
        (CODE_LLAMA, PREFIX_FIRST),
        (STARCODER, PREFIX_FIRST),
        (CODESTRAL, [BOS, 261, *b"yz", 260, *b"ab"]),
        (SEED, [BOS, 261, *b"yz", 260, *b"ab", 262]),
    ],
)
def test_each_family_has_its_order(site: Any, vocabulary: dict[str, int], prompt: list[int]) -> None:
    site.tokenizer.token_ids = vocabulary
    assert site.complete(prompt="ab", suffix="yz", stop_token_ids=[7]).status == 200
    (asked,) = site.engine.asked
    assert asked.input.token_ids == prompt
    assert set(asked.params.stop_token_ids) == {7, *vocabulary.values()}


def test_prompts_of_ids_or_of_nothing_are_filled_in_as_well(site: Any) -> None:
    site.tokenizer.token_ids = QWEN
    site.complete(prompt=[[65], [BOS, 66]], suffix="y")
    site.complete(prompt=None, suffix="y")
    site.tokenizer.bos_token_id = None
    site.complete(prompt=None, suffix="y")
    site.complete(prompt="", suffix="y", add_special_tokens=False)
    assert [asked.input.token_ids for asked in site.engine.asked] == [
        [260, 65, 261, *b"y", 262],
        [BOS, 260, 66, 261, *b"y", 262],
        [BOS, 260, 261, *b"y", 262],
        [260, 261, *b"y", 262],
        [260, 261, *b"y", 262],
    ]


def test_a_vocabulary_without_the_tokens_refuses(site: Any) -> None:
    site.tokenizer.token_ids = {"<|fim_prefix|>": 260, "<|fim_suffix|>": 261}
    reply = site.complete(suffix="yz")
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == ("unsupported_parameter", "suffix")
    assert site.complete(suffix="").status == 200


def test_echo_has_no_meaning_with_a_suffix(site: Any) -> None:
    site.tokenizer.token_ids = QWEN
    assert site.complete(suffix="yz", echo=True).error["param"] == "echo"
