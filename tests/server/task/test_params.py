import json
import pathlib
from typing import Any

import pytest

HONOURED = [
    ({"max_tokens": 5}, {"max_tokens": 5}),
    ({"min_tokens": 2, "max_tokens": 5}, {"min_tokens": 2}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"top_k": 7}, {"top_k": 7}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 10**30}, {"top_k": 300}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"min_p": 0.1}, {"min_p": 0.1}),
    ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
    ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
    ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"seed": 7}, {"seed": 7}),
    ({"seed": -1}, {"seed": 2**64 - 1}),
    ({"seed": 2**64 + 3}, {"seed": 3}),
    ({"stop_token_ids": [1, 2]}, {"stop_token_ids": (1, 2)}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"logit_bias": {"5": -100, "299": 1}}, {"logit_bias": {5: -100.0, 299: 1.0}}),
    ({"bad_words": ["no"]}, {"bad_words_token_ids": ((110, 111), (32, 110, 111))}),
    ({"allowed_token_ids": [3]}, {"allowed_token_ids": (3,)}),
]
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": None}


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(("body", "expected"), HONOURED)
def test_honoured(site: Any, endpoint: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    reply = getattr(site, endpoint)(**body)
    assert reply.status == 200, reply.text
    assert "x-ignored-params" not in reply.headers
    params = site.engine.asked[0].params
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"temperature": 2.5}, "temperature", ["0.0", "2.0", "2.5"]),
        ({"temperature": float("nan")}, "temperature", ["nan"]),
        ({"temperature": "1"}, "temperature", ["number", "'1'"]),
        ({"temperature": True}, "temperature", ["number", "True"]),
        ({"top_p": -0.1}, "top_p", ["-0.1"]),
        ({"top_k": -2}, "top_k", ["-2"]),
        ({"top_k": 1.5}, "top_k", ["integer", "1.5"]),
        ({"min_p": 2}, "min_p", ["1.0", "2"]),
        ({"presence_penalty": 3}, "presence_penalty", ["2.0", "3"]),
        ({"frequency_penalty": -3}, "frequency_penalty", ["-2.0", "-3"]),
        ({"repetition_penalty": 0}, "repetition_penalty", ["0"]),
        ({"n": 0}, "n", ["1", "32", "0"]),
        ({"n": 33}, "n", ["32", "33"]),
        ({"max_tokens": 0}, "max_tokens", ["1", "0"]),
        ({"max_tokens": -1}, "max_tokens", ["1", "-1"]),
        ({"min_tokens": -1}, "min_tokens", ["-1"]),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", ["5", "6"]),
        ({"min_tokens": 10**30}, "min_tokens", ["1000"]),
        ({"priority": 2**40}, "priority", [str(2**40)]),
        ({"logit_bias": {"300": 1}}, "logit_bias", ["299", "300"]),
        ({"logit_bias": {"-1": 1}}, "logit_bias", ["-1"]),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", ["299"]),
        ({"logit_bias": {"a": 1}}, "logit_bias", ["a"]),
        ({"logit_bias": {"1": 101}}, "logit_bias", ["100", "101"]),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1", ["number"]),
        ({"stop_token_ids": [1, 300]}, "stop_token_ids[1]", ["299", "300"]),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]", ["-1"]),
        ({"allowed_token_ids": []}, "allowed_token_ids", ["at least one"]),
        ({"bad_words": ["a", " "]}, "bad_words[1]", ["empty"]),
        ({"bad_words": ["a"] * 1025}, "bad_words", ["between 0 and 1024", "1025"]),
        ({"stop": ""}, "stop", ["empty"]),
        ({"stop": ["a", ""]}, "stop[1]", ["empty"]),
        ({"stop": ["a"] * 65}, "stop", ["64", "65"]),
        ({"stop": ["a", 1]}, "stop[1]", ["string", "1"]),
        ({"stream_options": {"include_usage": True}}, "stream_options", ["stream"]),
        ({"stream": "yes"}, "stream", ["boolean"]),
    ],
)
def test_refused(site: Any, endpoint: str, body: dict[str, Any], param: str, told: list[str]) -> None:
    content = json.dumps({"messages": [{"role": "user", "content": "a"}], "prompt": "a", **body})
    path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
    reply = site.call("POST", path, content=content, headers={"content-type": "application/json"})
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["code"] in ("invalid_value", "invalid_type")
    assert reply.error["param"] == param
    assert param.split("[")[0].split(".")[0] in reply.error["message"]
    assert all(text in reply.error["message"] for text in told), reply.error["message"]
    assert not site.engine.asked


def test_without_a_seed_every_request_has_its_own(site: Any) -> None:
    site.chat()
    site.chat()
    first, second = (asked.params.seed for asked in site.engine.asked)
    assert first != second


def test_defaults(site: Any) -> None:
    site.chat()
    params = site.engine.asked[0].params
    assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS
    assert params.max_tokens is None
    site.complete()
    assert site.engine.asked[1].params.max_tokens == 16


def test_the_checkpoints_defaults_apply_to_absent_fields_only(make_site: Any, tmp_path: pathlib.Path) -> None:
    config = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "eos_token_id": 1,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    site = make_site(model=str(tmp_path))
    site.chat(temperature=0, top_k=0)
    params = site.engine.asked[0].params
    assert (params.temperature, params.top_k) == (0.0, 0)
    assert (params.top_p, params.min_p, params.repetition_penalty) == (0.95, 0.1, 1.1)
    shown = site.call("GET", "/v1/models").json["data"][0]["default_sampling_params"]
    assert shown == {name: config[name] for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}


def test_many_stop_strings_are_accepted(site: Any) -> None:
    site.engine.answers = ["one two three"]
    answer = site.chat(stop=["a", "b", "c", "d", "two"]).json["choices"][0]
    assert answer["message"]["content"] == "one "


def test_text_options(site: Any) -> None:
    site.engine.answers = ["one two three"]
    included = site.chat(stop="two", include_stop_str_in_output=True).json["choices"][0]
    assert (included["message"]["content"], included["stop_reason"]) == ("one two", "two")
    late = site.chat(stop="o", min_tokens=4).json["choices"][0]
    assert late["message"]["content"] == "one tw"
    by_token = site.chat(stop_token_ids=[ord("w")]).json["choices"][0]
    assert (by_token["message"]["content"], by_token["stop_reason"]) == ("one t", ord("w"))


def test_special_tokens_are_shown_on_request(site: Any) -> None:
    assert site.chat().json["choices"][0]["message"]["content"] == "Hällo, wörld!"
    shown = site.chat(skip_special_tokens=False, include_stop_str_in_output=True)
    assert shown.json["choices"][0]["message"]["content"] == "Hällo, wörld!<257>"


def test_ids_that_are_named_again_and_again_are_sent_once(site: Any) -> None:
    """A million duplicates were sent to the engine, which read all of them at every step."""
    site.complete(allowed_token_ids=[7, 5] * 1000, stop_token_ids=[9, 8] * 1000)
    assert site.engine.asked[0].params.allowed_token_ids == (7, 5)
    assert site.engine.asked[0].params.stop_token_ids == (9, 8)
