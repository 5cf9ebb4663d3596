"""llama.cpp's own routes over a fake engine: fields honoured, or refused by name; its answer and its stream."""

import json
from typing import Any

import msgspec
import pytest

from weft.engine.wire.messages import FinishReason
from weft.server.apis.llama_cpp.route import LlamaCppAnswer


def send(site: Any, path: str = "/completion", **body: Any) -> Any:
    return site.call("POST", path, json={"prompt": "Hi", **body} if path == "/completion" else body)


def events(reply: Any) -> list[Any]:
    lines = reply.text.removesuffix("\n\n").split("\n\n")
    return [msgspec.json.decode(line.removeprefix("data: "), type=LlamaCppAnswer) for line in lines]


def test_the_whole_answer(site: Any) -> None:
    answer = send(site).json
    assert answer["content"] == "Hällo, wörld!"
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "eos", "")
    assert (answer["tokens_evaluated"], answer["prompt"], answer["model"]) == (3, "Hi", "org/fake model")
    assert answer["timings"]["predicted_n"] == answer["tokens_predicted"]
    assert "completion_probabilities" not in answer
    cut = send(site, n_predict=2).json
    assert (cut["stop_type"], cut["tokens_predicted"]) == ("limit", 2)
    word = send(site, stop=["wör"]).json
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("Hällo, ", "word", "wör")


def test_a_stream_is_the_whole_answer(site: Any) -> None:
    *parts, last = events(send(site, stream=True))
    assert "".join(part.content for part in parts) == "Hällo, wörld!"
    assert not any(part.stop for part in parts)
    assert (last.stop, last.content, last.stop_type) == (True, "", "eos")


def test_tokens_and_probabilities(site: Any) -> None:
    answer = send(site, n_probs=2, return_tokens=True, n_predict=3).json
    assert answer["tokens"] == list("Hä".encode())
    first = answer["completion_probabilities"][0]
    assert (first["id"], first["token"], first["bytes"], first["logprob"]) == (72, "H", [72], -0.5)
    assert [each["id"] for each in first["top_logprobs"]] == [72, 73]


def test_sampling_reaches_the_engine(site: Any) -> None:
    send(site, temperature=0.5, top_k=-1, min_p=0.1, seed=-1, repeat_penalty=1.1, logit_bias=[[5, False], [6, 2]])
    asked = site.engine.asked[-1]
    assert (asked.params.temperature, asked.params.top_k, asked.params.min_p) == (0.5, 0, 0.1)
    assert asked.params.repetition_penalty == 1.1
    assert asked.params.logit_bias == {5: -100.0, 6: 2.0}
    send(site, logit_bias={"5": False, "6": 2})
    assert site.engine.asked[-1].params.logit_bias == asked.params.logit_bias
    assert asked.params.max_tokens is None
    assert asked.request.caching.is_used
    send(site, cache_prompt=False, n_predict=5000)
    asked = site.engine.asked[-1]
    assert not asked.request.caching.is_used
    assert asked.params.max_tokens == 1000 - 3


def test_a_gap_is_filled(site: Any) -> None:
    site.tokenizer.token_ids = {"<|fim_prefix|>": 290, "<|fim_suffix|>": 291, "<|fim_middle|>": 292}
    site.tokenizer.bos_token_id = None
    body = {"input_prefix": "ab", "input_suffix": "ef", "prompt": "c", "input_extra": [{"filename": "x", "text": "y"}]}
    assert send(site, "/infill", **body).status == 200
    prompt = list(b"--- x ---\ny\nabc")
    assert [i for i in site.engine.asked[-1].input.token_ids if i != 256] == [290, *prompt, 291, *b"ef", 292]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n_predict": 0}, "n_predict must be at least 1, got 0"),
        ({"n_probs": 99}, "n_probs must be between 0 and 20, got 99"),
        ({"repeat_penalty": -1}, "repeat_penalty must"),
        ({"mirostat": 2}, "mirostat is not supported"),
        ({"dry_multiplier": 0.8}, "dry_multiplier is not supported"),
        ({"image_data": [{"id": 1}]}, "image_data is not supported"),
        ({"grammar": "start: 'a'"}, "grammar must be GBNF"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "cannot be used together with"),
        ({"prompt": ["a", "b"]}, "prompt[0]"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_sent(site: Any, body: Any, message: str) -> None:
    reply = send(site, **body)
    error = reply.json["error"]
    assert (reply.status, error["code"], error["type"]) == (400, 400, "invalid_request_error")
    assert message in error["message"]


def test_what_has_no_effect_is_reported(site: Any) -> None:
    reply = send(site, samplers=["top_k"], id_slot=1, xtc_probability=0.0)
    assert reply.headers["x-ignored-params"] == "samplers,id_slot"


def test_without_tokens_for_it_a_gap_is_refused(site: Any) -> None:
    reply = send(site, "/infill", input_prefix="a", input_suffix="b")
    assert (reply.status, "input_suffix is not supported by this model" in reply.json["error"]["message"]) == (
        400,
        True,
    )


def test_a_failure_in_a_stream_is_its_last_event(site: Any) -> None:
    site.engine.finish = FinishReason.ERROR
    *_, last = send(site, stream=True).text.removesuffix("\n\n").split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
