from typing import Any

import pytest


def texts(events: list[Any], index: int = 0) -> str:
    return "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)


def test_plain_answer(site: Any) -> None:
    site.engine.answers = ["one"]
    answer = site.complete().json
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "org/fake model")
    assert answer["choices"] == [
        {"index": 0, "text": "one", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 4)


def test_stream(site: Any) -> None:
    site.engine.answers = ["one"]
    events = site.complete(stream=True, stream_options={"include_usage": True}).events
    assert {event["object"] for event in events} == {"text_completion"}
    assert texts(events) == "one"
    assert [choice["finish_reason"] for event in events for choice in event["choices"]] == [None, None, None, "stop"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 7


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", [[256, 72, 105]]),
        (["a", "b"], [[256, 97], [256, 98]]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
        (None, [[256]]),
        ("", [[256]]),
    ],
)
def test_prompt_forms(site: Any, prompt: Any, expected: list[list[int]]) -> None:
    assert site.complete(prompt=prompt).status == 200
    assert [asked.input.token_ids for asked in site.engine.asked] == expected


def test_no_prompt_without_a_beginning_of_text_token(site: Any) -> None:
    site.tokenizer.bos_token_id = None
    site.complete(prompt=None)
    assert site.engine.asked[0].input.token_ids == [257]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt"),
        ([1, 300], "prompt[1]"),
        ([[1], [2, -1]], "prompt[1][1]"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        (5, "prompt"),
        ({}, "prompt"),
    ],
)
def test_wrong_prompts(site: Any, prompt: Any, param: str) -> None:
    reply = site.complete(prompt=prompt)
    assert reply.status == 400
    assert reply.error["param"] == param


def test_empty_prompt_without_special_tokens_is_refused(site: Any) -> None:
    assert site.complete(prompt="", add_special_tokens=False).error["param"] == "prompt"
    site.complete(prompt="a", add_special_tokens=False)
    assert site.engine.asked[0].input.token_ids == [97]


def test_many_prompts_times_n(site: Any) -> None:
    site.engine.answers = ["a", "b", "c", "d"]
    plain = site.complete(prompt=["x", "y"], n=2).json
    assert [(choice["index"], choice["text"]) for choice in plain["choices"]] == [
        (0, "a"),
        (1, "b"),
        (2, "b"),
        (3, "c"),
    ]
    assert plain["usage"]["prompt_tokens"] == 4
    site.engine.asked.clear()
    events = site.complete(prompt=["x", "y"], n=2, stream=True).events
    assert [texts(events, index) for index in range(4)] == ["a", "b", "b", "c"]
    assert all(asked.generation.closed.is_set() for asked in site.engine.asked)


def test_each_prompt_of_a_list_has_random_numbers_of_its_own(site: Any) -> None:
    """Six equal prompts without a seed were answered with six equal texts."""
    site.complete(prompt=["x"] * 6, n=2)
    assert len({asked.params.seed for asked in site.engine.asked}) == 6
    site.engine.asked.clear()
    site.complete(prompt=["x"] * 6, seed=7)
    assert [asked.params.seed for asked in site.engine.asked] == [7] * 6


def test_no_more_prompts_than_may_wait(make_site: Any) -> None:
    site = make_site(max_num_waiting=3)
    assert site.complete(prompt=["a"] * 3).status == 200
    error = site.complete(prompt=["a"] * 4).error
    assert (error["param"], error["message"]) == ("prompt", "the number of prompts must be between 0 and 3, got 4")


def test_long_prompts_are_encoded_off_the_event_loop(make_site: Any) -> None:
    site = make_site()
    site.complete(prompt="x" * 5000)
    assert site.tokenizer.threads
    assert "MainThread" not in site.tokenizer.threads


def test_many_prompts_are_encoded_off_the_event_loop(site: Any) -> None:
    """Each was measured alone: a thousand of moderate length held up every stream of the process."""
    site.complete(prompt=["x" * 500] * 10)
    assert site.tokenizer.threads
    assert "MainThread" not in site.tokenizer.threads


def test_when_one_prompt_is_not_accepted_none_stays(site: Any) -> None:
    assert site.complete(prompt=["x", "y" * 1000]).error["code"] == "context_length_exceeded"
    assert not site.engine.asked


def test_echo_and_scoring(site: Any) -> None:
    reply = site.complete(prompt="Hi", echo=True, logprobs=2, max_tokens=0)
    choice = reply.json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
    assert choice["logprobs"] == {
        "tokens": ["<256>", "H", "i"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"H": -0.5, "I": -1.5}, {"i": -0.5, "j": -1.5}],
        "text_offset": [0, 0, 1],
    }
    assert site.engine.asked[0].params.prompt_logprobs == 2
    assert reply.json["usage"]["completion_tokens"] == 0


def test_max_tokens_zero_needs_echo(site: Any) -> None:
    assert site.complete(max_tokens=0).error["param"] == "max_tokens"
    assert site.complete(max_tokens=0, echo=True).json["choices"][0]["text"] == "Hi"


def test_text_offsets_point_into_prompt_and_text(site: Any) -> None:
    site.engine.answers = ["aéb"]
    for body in ({"echo": True}, {}):
        choice = site.complete(prompt="é!", logprobs=0, **body).json["choices"][0]
        whole = choice["text"] if body else "é!" + choice["text"]
        logprobs = choice["logprobs"]
        offsets = dict(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
        assert all(whole[offsets[char]] == char for char in "ab")
        assert logprobs["text_offset"][-5:] == [2, 3, 3, 4, 5]  # a, two of é, b, end of sequence
        assert len(logprobs["tokens"]) == (9 if body else 5)


def test_the_end_of_sequence_has_its_logprob_but_a_cut_token_has_none(site: Any) -> None:
    site.engine.answers = ["abc"]
    assert site.complete(logprobs=0).json["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c", "<257>"]
    assert site.complete(logprobs=0, stop="bc").json["choices"][0]["logprobs"]["tokens"] == ["a"]


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("prompt", [["Hä", "x"], [[200, 72], [105]]])
@pytest.mark.parametrize("body", [{"echo": True}, {"stop": "wör"}, {"echo": True, "max_tokens": 0}, {"n": 2}])
def test_concatenated_stream_equals_the_plain_answer(site: Any, chunk: int, body: dict[str, Any], prompt: Any) -> None:
    site.engine.chunk = chunk
    ask = {"prompt": prompt, "logprobs": 2, "return_token_ids": True, **body}
    plain = site.complete(**ask).json["choices"]
    events = site.complete(stream=True, **ask).events
    for choice in plain:
        gained = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert texts(events, choice["index"]) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for c in gained if c["logprobs"] for value in c["logprobs"][name]] == values
        assert [i for c in gained for i in c.get("token_ids", [])] == choice["token_ids"]
        assert gained[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert all("prompt_token_ids" not in c for c in gained[1:])
        assert gained[-1]["finish_reason"] == choice["finish_reason"]


def test_the_echo_is_the_first_chunk(site: Any) -> None:
    events = site.complete(prompt="Hi", echo=True, stream=True).events
    assert events[0]["choices"][0]["text"] == "Hi"


def test_best_of_shows_the_most_probable(site: Any) -> None:
    site.engine.answers = ["a", "b", "c"]
    site.engine.logprob_of_choice = [-3.0, -1.0, -2.0].__getitem__
    answer = site.complete(n=2, best_of=3).json
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "b"), (1, "c")]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 6
    assert site.engine.asked[0].num_choices == 3


@pytest.mark.parametrize(
    "body", [{"best_of": 1, "n": 2}, {"best_of": 33}, {"best_of": 2, "stream": True}, {"best_of": 0}]
)
def test_best_of_has_bounds(site: Any, body: dict[str, Any]) -> None:
    assert site.complete(**body).error["param"] == "best_of"


@pytest.mark.parametrize("count", [-1, 21])
def test_logprobs_have_bounds(site: Any, count: int) -> None:
    assert site.complete(logprobs=count).error["message"] == f"logprobs must be between 0 and 20, got {count}"


def test_special_token_text_in_an_echoed_prompt_stays(site: Any) -> None:
    assert site.complete(prompt="a<256>b", echo=True, max_tokens=1, logprobs=0).json["choices"][0]["text"] == "a<256>bH"
    assert site.complete(prompt=[97, 256, 98], echo=True, max_tokens=1).json["choices"][0]["text"] == "abH"
