from typing import Any

import pytest

from tests.server.conftest import MAX_MODEL_LEN


def test_the_end_of_the_prompt_is_kept(site: Any) -> None:
    site.complete(prompt="a long prompt", truncate_prompt_tokens=6)
    site.chat(truncate_prompt_tokens=10)
    site.complete(prompt="short", truncate_prompt_tokens=900)
    assert [bytes(i for i in asked.input.token_ids if i < 256) for asked in site.engine.asked] == [
        b"prompt",
        b"assistant:",
        b"short",
    ]


@pytest.mark.parametrize(("max_tokens", "num_kept"), [(100, MAX_MODEL_LEN - 100), (None, MAX_MODEL_LEN - 1)])
def test_minus_one_keeps_what_fits(site: Any, max_tokens: int | None, num_kept: int) -> None:
    messages = [{"role": "user", "content": "x" * 3000}]
    assert site.chat(messages=messages, max_tokens=max_tokens).error["code"] == "context_length_exceeded"
    assert site.chat(messages=messages, max_tokens=max_tokens, truncate_prompt_tokens=-1).status == 200
    assert len(site.engine.asked[0].input.token_ids) == num_kept


def test_echo_shows_what_was_kept(site: Any) -> None:
    reply = site.complete(prompt="a long prompt", truncate_prompt_tokens=6, echo=True, max_tokens=1)
    assert reply.json["choices"][0]["text"] == "promptH"


@pytest.mark.parametrize("value", [0, -2, MAX_MODEL_LEN + 1])
def test_other_lengths_are_refused(site: Any, value: int) -> None:
    error = site.chat(truncate_prompt_tokens=value).error
    assert error["param"] == "truncate_prompt_tokens"
    assert str(value) in error["message"]


@pytest.mark.parametrize("max_tokens", [MAX_MODEL_LEN, 2**31])
def test_an_output_that_never_fits_leaves_the_prompt_its_room(make_site: Any, max_tokens: int) -> None:
    body = {"prompt": "x" * 3000, "max_tokens": max_tokens, "truncate_prompt_tokens": -1}
    site = make_site()
    assert site.complete(**body).status == 200
    assert len(site.engine.asked[0].input.token_ids) == MAX_MODEL_LEN - 1
    assert make_site(strict_params=True).complete(**body).error["code"] == "context_length_exceeded"
