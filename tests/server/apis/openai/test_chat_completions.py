from typing import Any

import pytest

from weft.engine.wire.messages import FinishReason

PROMPT = "user: Hi\nassistant:"


def choices(events: list[Any], index: int = 0) -> list[Any]:
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


def content(events: list[Any], index: int = 0) -> str:
    return "".join(choice["delta"].get("content", "") for choice in choices(events, index))


def test_plain_answer(site: Any) -> None:
    reply = site.chat()
    answer = reply.json
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"], answer["service_tier"]) == (
        "chat.completion",
        "org/fake model",
        "default",
    )
    assert answer["system_fingerprint"].startswith("fp_")
    message: dict[str, Any] = {"role": "assistant", "content": "Hällo, wörld!", "refusal": None, "annotations": []}
    assert answer["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    num_prompt = len(PROMPT) + 1
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 16,
        "total_tokens": num_prompt + 16,
        "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": num_prompt // 4 * 4 - 4},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    assert site.engine.asked[0].generation.closed.is_set()


def test_without_a_prefix_cache_nothing_is_written_to_it(make_site: Any) -> None:
    usage = make_site(prefix_caching=False).chat().json["usage"]
    assert usage["prompt_tokens_details"]["cache_write_tokens"] == 0


def test_stream_is_role_content_reason_usage(site: Any) -> None:
    site.engine.answers = ["Hé"]
    reply = site.chat(stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert "é" in reply.text
    events = reply.events
    deltas = [choice["delta"] for choice in choices(events)]
    assert deltas == [{"role": "assistant", "content": "", "refusal": None}, {"content": "H"}, {"content": "é"}, {}]
    assert [choice["finish_reason"] for choice in choices(events)] == [None, None, None, "stop"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(e["id"], e["created"], e["model"], e["system_fingerprint"]) for e in events}) == 1
    assert [event["usage"] for event in events[:-1]] == [None] * 4
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == site.chat().json["usage"]
    assert site.engine.asked[0].generation.closed.is_set()


def test_stream_without_usage_does_not_mention_it(site: Any) -> None:
    events = site.chat(stream=True).events
    assert all("usage" not in event and event["choices"] for event in events)


def test_usage_on_every_chunk(site: Any) -> None:
    events = site.chat(stream=True, stream_options={"continuous_usage_stats": True}).events
    assert events[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 16


def test_obfuscation_only_on_request(site: Any) -> None:
    padded = site.chat(stream=True, stream_options={"include_obfuscation": True}).events
    assert "obfuscation" not in site.chat(stream=True).text
    for event in padded:
        text = event["choices"][0]["delta"].get("content", "")
        assert (len(text.encode()) + len(event["obfuscation"])) % 32 == 0


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize("body", [{}, {"stop": "wör"}, {"stop": ["ld", "zz"], "n": 3}, {"max_tokens": 2}])
def test_concatenated_stream_equals_the_plain_answer(site: Any, chunk: int, body: dict[str, Any]) -> None:
    site.engine.answers = ["Hällo, wörld!", "😀😀 world", "wwwör"]
    site.engine.chunk = chunk
    plain = site.chat(logprobs=True, top_logprobs=2, return_token_ids=True, **body).json
    site.engine.asked.clear()
    reply = site.chat(
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
        return_token_ids=True,
        **body,
    )
    events = reply.events
    assert events[-1]["usage"] == plain["usage"]
    assert events[0]["prompt_token_ids"] == plain["prompt_token_ids"]
    for choice in plain["choices"]:
        index = choice["index"]
        assert content(events, index) == choice["message"]["content"]
        gained = choices(events, index)
        logprobs = [entry for c in gained for entry in (c["logprobs"] or {"content": []})["content"]]
        assert logprobs == choice["logprobs"]["content"]
        assert [i for c in gained for i in c.get("token_ids", [])] == choice["token_ids"]
        assert gained[-1]["finish_reason"] == choice["finish_reason"]
        assert gained[-1].get("stop_reason") == choice["stop_reason"]


def test_n_choices_share_one_request(site: Any) -> None:
    site.engine.answers = ["one", "two"]
    answer = site.chat(n=2).json
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["one", "two"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [asked.num_choices for asked in site.engine.asked] == [2]
    assert answer["usage"]["prompt_tokens"] == len(PROMPT) + 1
    assert answer["usage"]["completion_tokens"] == 8


def test_a_stop_string_stops_its_choice_in_the_engine(site: Any) -> None:
    site.engine.answers = ["one two three", "one"]
    answer = site.chat(n=2, stop=" t").json
    first, second = answer["choices"]
    assert (first["message"]["content"], first["finish_reason"], first["stop_reason"]) == ("one", "stop", " t")
    assert (second["finish_reason"], second["stop_reason"]) == ("stop", None)
    assert site.engine.asked[0].generation.aborted == {0}
    assert answer["usage"]["completion_tokens"] == len("one t") + len("one") + 1


def test_no_part_of_a_stop_string_is_streamed(site: Any) -> None:
    site.engine.answers = ["abc</s>def"]
    events = site.chat(stream=True, stop="</s>").events
    assert content(events) == "abc"
    assert events[-1]["choices"][0]["stop_reason"] == "</s>"


def test_max_tokens_names(site: Any) -> None:
    answer = site.chat(max_tokens=9, max_completion_tokens=3).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3
    assert site.chat(max_completion_tokens=0).error["param"] == "max_completion_tokens"


def test_logprobs_are_those_of_the_text(site: Any) -> None:
    site.engine.answers = ["é"]
    logprobs = site.chat(logprobs=True, top_logprobs=1).json["choices"][0]["logprobs"]
    first, second = "é".encode()
    assert [entry["bytes"] for entry in logprobs["content"]] == [[first], [second]]
    assert logprobs["refusal"] is None
    assert logprobs["content"][0]["top_logprobs"] == [{"token": "\ufffd", "logprob": -0.5, "bytes": [first]}]
    alone = site.chat(logprobs=True).json["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in alone] == [[], []]
    assert site.engine.asked[1].params.logprobs == 0


def test_logprobs_of_a_character_come_with_it(site: Any) -> None:
    site.engine.answers = ["é"]
    gained = [choice for choice in choices(site.chat(stream=True, logprobs=True).events) if choice["logprobs"]]
    assert [(c["delta"]["content"], len(c["logprobs"]["content"])) for c in gained] == [("é", 2)]


def test_arguments_that_are_nested_too_deeply(site: Any) -> None:
    """JSON inside a string passes the body's parser: ten thousand brackets in the arguments of a call were a 500."""
    arguments = "[" * 10_000 + "]" * 10_000
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    assert site.chat(messages=[{"role": "assistant", "tool_calls": [call]}]).status == 200
    assert site.tokenizer.rendered[0]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("body", [{"top_logprobs": 3}, {"logprobs": False, "top_logprobs": 1}])
def test_top_logprobs_need_logprobs(site: Any, body: dict[str, Any]) -> None:
    assert site.chat(**body).error["param"] == "top_logprobs"


@pytest.mark.parametrize("count", [-1, 21])
def test_top_logprobs_have_bounds(site: Any, count: int) -> None:
    error = site.chat(logprobs=True, top_logprobs=count).error
    assert error["message"] == f"top_logprobs must be between 0 and 20, got {count}"


def test_impossible_logprobs_are_numbers(site: Any) -> None:
    site.engine.logprob_of_choice = lambda index: float("-inf")
    entries = site.chat(logprobs=True).json["choices"][0]["logprobs"]["content"]
    assert {entry["logprob"] for entry in entries} == {-9999.0}


def test_what_the_engine_is_told(site: Any) -> None:
    reply = site.chat(priority=3, cache_salt="s", prompt_cache_key="k", user="me")
    assert sorted(reply.headers["x-ignored-params"].split(",")) == ["prompt_cache_key", "user"]
    asked = site.engine.asked[0]
    assert asked.input.token_ids == [256, *PROMPT.encode()]
    assert asked.priority == 3
    assert asked.deadline is None
    other = site.chat(cache_salt="s") and site.engine.asked[1]
    plain = site.chat() and site.engine.asked[2]
    assert asked.cache_salt == other.cache_salt == "s"
    assert plain.cache_salt == ""
    keyed = site.chat(prompt_cache_key="k") and site.engine.asked[3]
    assert keyed.cache_salt == "", "agents send a key of their own for each session, which shares its beginning"
    assert asked.tenant not in ("", "me")
    assert plain.tenant == ""


def test_context_length(make_site: Any) -> None:
    site, num_prompt = make_site(strict_params=True), len(PROMPT) + 1
    assert site.chat(max_tokens=1000 - num_prompt).status == 200
    reply = site.chat(max_tokens=1001 - num_prompt)
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", "messages")
    assert "1000" in reply.error["message"]
    assert "1001" in reply.error["message"]
    full = site.chat(messages=[{"role": "user", "content": "x" * 1000}])
    assert full.error["code"] == "context_length_exceeded"


def test_model_names(site: Any, make_site: Any) -> None:
    assert site.chat(model="alias").json["model"] == "alias"
    reply = site.chat(model="gpt-x")
    assert reply.status == 404
    assert (reply.error["code"], reply.error["param"]) == ("model_not_found", "model")
    anything_goes = make_site(any_model_name=True)
    assert anything_goes.chat(model="x" * 256).json["model"] == "x" * 256
    error = anything_goes.chat(model="x" * 257).error
    assert (error["message"], error["param"]) == ("model must have at most 256 characters, got 257", "model")


def test_template_errors_are_the_callers(site: Any) -> None:
    reply = site.chat(messages=[{"role": "user", "content": "refuse me"}])
    assert reply.status == 400
    assert reply.error["param"] == "messages"


def test_long_messages_are_encoded_off_the_event_loop(site: Any) -> None:
    site.chat(messages=[{"role": "user", "content": "x" * 5000}])
    assert site.tokenizer.threads == {"chats"}
    site.chat(messages=[{"role": "user", "content": "x" * 300_000}], truncate_prompt_tokens=10)
    assert site.tokenizer.threads == {"chats", "long chats"}


def test_short_messages_are_rendered_off_the_event_loop(site: Any) -> None:
    """A template that was slow for a short chat held up every stream of the process."""
    site.chat()
    assert site.call("POST", "/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).status == 200
    assert site.tokenizer.threads == {"chats"}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x"}] * 500,
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x" * 5000}}]}],
    ],
    ids=["many", "arguments"],
)
def test_long_conversations_are_encoded_off_the_event_loop(site: Any, messages: Any) -> None:
    """Only the contents were measured: long calls and many short messages held up every stream of the process."""
    site.chat(messages=messages)
    assert site.tokenizer.threads
    assert "MainThread" not in site.tokenizer.threads


def test_long_bad_words_are_encoded_off_the_event_loop(site: Any) -> None:
    """They were encoded on the event loop, however long: megabytes of them held up every stream of the process."""
    site.chat(bad_words=["x" * 1000] * 5)
    assert site.tokenizer.threads
    assert "MainThread" not in site.tokenizer.threads


@pytest.mark.parametrize(
    "reason", [FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.ABORT, FinishReason.DEAD_END]
)
def test_a_choice_that_the_engine_gives_up(site: Any, reason: FinishReason) -> None:
    expected = {
        FinishReason.ERROR: (500, "internal_error"),
        FinishReason.DEAD_END: (400, "invalid_grammar"),
        FinishReason.TIMEOUT: (504, "request_timeout"),
        FinishReason.ABORT: (503, "engine_restarting"),
    }
    site.engine.finish = reason
    reply = site.chat()
    assert (reply.status, reply.error["code"]) == expected[reason]
    events = site.chat(stream=True).events
    assert events[-1]["error"]["code"] == expected[reason][1]
    assert all(asked.generation.closed.is_set() for asked in site.engine.asked)
