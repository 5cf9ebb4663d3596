"""Output that continues a prompt keeps its first space, which SentencePiece leaves out where a text begins."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chat_templates_for_tests import CHATML
from tests.tokenizers_for_tests import metaspace, sentencepiece, wordpiece, write_checkpoint
from weft.server.text.tokenizer import Tokenizer


@pytest.fixture(params=[sentencepiece, metaspace, wordpiece])
def site(request: pytest.FixtureRequest, make_site: Any, tmp_path: Path) -> Any:
    """The engine goes on with " user", whatever it is asked."""
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path / "model", request.param(), template=CHATML))
    site = make_site()
    site.tokenizer = tokenizer
    site.rebuild()
    whole, begun = tokenizer.encode("the user", False), tokenizer.encode("the", False)
    assert whole[: len(begun)] == begun
    site.engine.answers = [SimpleNamespace(encode=lambda: whole[len(begun) :])]
    return site


def test_a_completion_keeps_its_first_space(site: Any) -> None:
    """It read "theuser"."""
    assert site.complete(prompt="the").json["choices"][0]["text"] == " user"
    events = site.complete(prompt="the", stream=True).events
    assert "".join(event["choices"][0]["text"] for event in events) == " user"


def test_each_choice_of_each_prompt_keeps_it(site: Any) -> None:
    choices = site.complete(prompt=["the", "and the"], n=2).json["choices"]
    assert [choice["text"] for choice in choices] == [" user"] * 4


def test_an_echoed_prompt_and_its_completion_are_one_text(site: Any) -> None:
    assert site.complete(prompt="the", echo=True).json["choices"][0]["text"] == "the user"


def test_a_continued_message_keeps_it_and_a_new_one_has_none(site: Any) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "the"}]
    continued = site.chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert continued.json["choices"][0]["message"]["content"] == " user"
    assert site.chat(messages=messages[:1]).json["choices"][0]["message"]["content"] == "user"
