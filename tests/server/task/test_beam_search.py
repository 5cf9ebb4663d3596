"""What a body asks of a beam search, over the fake engine."""

from typing import Any

import pytest

from tests.chat_templates_for_tests import QWEN3
from weft.engine.wire.messages import BeamOptions, FinishReason, RejectReason
from weft.server.errors import rejection


def test_each_beam_is_a_choice_of_one_request(site: Any) -> None:
    """Every beam was a request of its own for every token, each with the whole prompt."""
    site.engine.answers = ["Hello", "Hallo"]
    reply = site.complete(use_beam_search=True, n=2, max_tokens=2, logprobs=1)
    assert reply.status == 200
    assert [choice["text"] for choice in reply.json["choices"]] == ["He", "Ha"]
    assert [len(top) for top in reply.json["choices"][0]["logprobs"]["top_logprobs"]] == [1, 1]
    assert reply.json["usage"]["completion_tokens"] == 4
    assert reply.json["usage"]["prompt_tokens"] == 3
    (asked,) = site.engine.asked
    assert (asked.beams, asked.num_choices, asked.params.max_tokens, asked.params.logprobs) == (BeamOptions(), 2, 2, 1)


def test_chat_takes_beams_too(site: Any) -> None:
    reply = site.chat(use_beam_search=True, n=3, max_tokens=1, length_penalty=0.5, early_stopping="never")
    assert len(reply.json["choices"]) == 3
    assert site.engine.asked[0].beams == BeamOptions(0.5, "never")


def test_what_changes_probabilities_goes_along(site: Any) -> None:
    rules = {"logit_bias": {"1": 5}, "min_tokens": 1, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    assert site.complete(use_beam_search=True, n=2, max_tokens=3, **rules).status == 200
    params = site.engine.asked[0].params
    assert (params.logit_bias, params.min_tokens) == ({1: 5.0}, 1)
    assert (params.repetition_penalty, params.no_repeat_ngram_size) == (1.5, 2)
    reply = site.complete(no_repeat_ngram_size=1025)
    assert (reply.status, reply.error["param"]) == (400, "no_repeat_ngram_size")


def test_nobody_searches_unasked(site: Any) -> None:
    assert site.complete(n=2).status == site.chat(use_beam_search=False).status == 200
    assert [asked.beams for asked in site.engine.asked] == [None, None]


def test_a_search_may_leave_the_prefix_cache_alone(site: Any) -> None:
    """It was refused, since every step of every beam would have computed the prompt again."""
    assert site.complete(use_beam_search=True, n=2, prompt_cache_options={"mode": "explicit"}).status == 200
    assert not site.engine.asked[0].caching.is_used


def test_beams_follow_no_grammar(site: Any) -> None:
    reply = site.chat(use_beam_search=True, n=2, response_format={"type": "json_object"})
    assert (reply.status, reply.error["param"]) == (400, "use_beam_search")
    assert not site.engine.asked


def test_beams_keep_to_no_budget_for_reasoning(site: Any) -> None:
    site.tokenizer.template = QWEN3
    site.tokenizer.added_ids = {"<think>": 300, "</think>": 301}
    site.rebuild()
    body = {"n": 2, "thinking_token_budget": 1}
    assert site.chat(**body).status == 200
    reply = site.chat(use_beam_search=True, **body)
    assert (reply.status, reply.error["param"]) == (400, "use_beam_search")
    assert "neither a grammar nor a budget" in reply.error["message"]
    assert len(site.engine.asked) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": True}, "stream"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"stop": "x"}, "stop"),
        ({"min_p": 0.1}, "min_p"),
        ({"best_of": 5, "n": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"n": 33}, "n"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
)
def test_what_has_no_meaning_with_beams_is_refused(make_site: Any, body: dict[str, Any], param: str) -> None:
    site = make_site(max_n=64)
    reply = site.complete(**{"use_beam_search": True, **body})
    assert reply.status == 400
    assert reply.error["param"] == param
    assert not site.engine.asked


def test_a_rejected_prompt_is_an_ordinary_error(site: Any) -> None:
    site.engine.refuse = rejection(RejectReason.QUEUE_FULL, "3 requests are waiting")
    assert site.complete(use_beam_search=True, n=2).status == 503


def test_an_engine_that_fails_within_the_search_is_an_error(site: Any) -> None:
    site.engine.finish = FinishReason.ERROR
    assert site.complete(use_beam_search=True, n=2).status == 500
