from typing import Any

import pytest

PROMPT = [256, *b"Hi"]


def position(token_id: int, count: int) -> dict[str, Any]:
    """What the fake engine says: the token is the best, the next ids follow."""
    text = bytes([token_id]).decode()
    shown = {str(token_id): {"logprob": -0.5, "rank": 1 if count else None, "decoded_token": text}}
    for i in range(1, count):
        shown[str(token_id + i)] = {"logprob": -0.5 - i, "rank": i + 1, "decoded_token": chr(token_id + i)}
    return shown


@pytest.mark.parametrize("count", [0, 1, 3])
def test_completions_report_every_position(site: Any, count: int) -> None:
    reply = site.complete(prompt_logprobs=count, n=2)
    expected = [None, position(ord("H"), count), position(ord("i"), count)]
    assert [choice["prompt_logprobs"] for choice in reply.json["choices"]] == [expected] * 2
    assert site.engine.asked[0].params.prompt_logprobs == count


def test_chat_reports_once(site: Any) -> None:
    reply = site.chat(prompt_logprobs=1)
    shown = reply.json["prompt_logprobs"]
    assert len(shown) == reply.json["usage"]["prompt_tokens"]
    assert shown[0] is None
    assert shown[1] == position(ord("u"), 1)


def test_echo_and_prompt_logprobs_share_the_engines_answer(site: Any) -> None:
    (choice,) = site.complete(prompt_logprobs=3, echo=True, logprobs=1, max_tokens=0).json["choices"]
    assert choice["prompt_logprobs"][1] == position(ord("H"), 3)
    assert choice["logprobs"]["top_logprobs"][1] == {"H": -0.5}


@pytest.mark.parametrize(
    "body", [{"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": 1, "stream": True}]
)
def test_what_cannot_be_reported_is_refused(site: Any, body: dict[str, Any]) -> None:
    for reply in (site.chat(**body), site.complete(**body)):
        assert reply.status == 400
        assert reply.error["param"] == "prompt_logprobs"


def test_the_prompt_is_shown_as_the_model_saw_it(site: Any) -> None:
    text = "<256>user: Hi\nassistant:"
    assert site.chat(return_prompt_text=True).json["prompt_text"] == text
    first, *others = site.chat(return_prompt_text=True, stream=True).events
    assert first["prompt_text"] == text
    assert not any("prompt_text" in event for event in others)
    assert site.complete(return_prompt_text=True).json["choices"][0]["prompt_text"] == "<256>Hi"
    events = site.complete(return_prompt_text=True, stream=True).events
    assert [event["choices"][0].get("prompt_text") for event in events[:2]] == ["<256>Hi", None]
    assert "prompt_text" not in site.chat().json


def test_asked_ids_are_reported_at_every_position(site: Any) -> None:
    content = site.chat(logprob_token_ids=[65, 66], max_tokens=2).json["choices"][0]["logprobs"]["content"]
    assert [[top["token"] for top in token["top_logprobs"]] for token in content] == [["A", "B"]] * 2
    both = site.chat(logprob_token_ids=[65], logprobs=True, top_logprobs=1, max_tokens=1).json["choices"][0]["logprobs"]
    assert [top["token"] for top in both["content"][0]["top_logprobs"]] == ["H", "A"]
    legacy = site.complete(logprob_token_ids=[65, 66], max_tokens=1).json["choices"][0]["logprobs"]
    assert legacy["top_logprobs"] == [{"A": -9.0, "B": -9.0, "H": -0.5}]


@pytest.mark.parametrize(
    ("ids", "param"),
    [([300], "logprob_token_ids[0]"), ([1] * 1025, "logprob_token_ids"), ([True], "logprob_token_ids[0]")],
)
def test_asked_ids_are_checked(site: Any, ids: Any, param: str) -> None:
    assert site.chat(logprob_token_ids=ids).error["param"] == param
