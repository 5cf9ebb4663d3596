"""POST /v1/decisions over a fake engine, which gives every asked id the log-probability -9."""

import json
import socket
import time
from typing import Any

import msgspec
import pytest

PREDICATE = {"type": "predicate", "instructions": "It is late."}
CHOICE = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": True}]}
SCORE = {"type": "score", "instructions": "How much?", "levels": [{"label": "low"}, {"label": "high"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def decide(site: Any, *questions: Any, **body: Any) -> Any:
    return site.call("POST", "/v1/decisions", json={"input": "Hi", "questions": questions or [PREDICATE], **body})


def prompts(site: Any) -> list[str]:
    return [
        bytes(token_id for token_id in asked.prompt_token_ids if token_id < 256).decode() for asked in site.engine.asked
    ]


def test_the_question_is_the_end_of_the_last_user_turn(site: Any) -> None:
    question = {
        "type": "choice",
        "instructions": "Which?",
        "choices": [{"value": "a", "description": "x"}, {"value": True}],
    }
    decide(site, question)
    lines = "Question: Which?\nA: a - x\nB: true\nAnswer with the letter of one option only."
    assert prompts(site) == [f"user: Hi\n\n{lines}\nassistant:"]
    asked = site.engine.asked[0].params
    assert (asked.max_tokens, asked.temperature, asked.logprob_token_ids) == (1, 0.0, (65, 66))


def test_items_become_a_chat(site: Any) -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_json", "data": {"ä": [1]}}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}], "phase": "commentary"},
        CALL,
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "6"}]},
    ]
    reply = decide(site, input=items)
    assert reply.status == 200, reply.text
    assert "input[2].phase" in reply.headers["x-ignored-params"]
    decide(site, input=items[:3])
    first = "developer: Be kind.\nuser: Hi\n" + '{"ä":[1]}' + "\nassistant: I look.\n"
    question = "user: Is the following true? It is late.\nAnswer with yes or no only.\nassistant:"
    shown = prompts(site)
    assert shown[0].startswith(first + "tool: 5\ntool: 6\n" + question)
    assert shown[-1].startswith(first + question)


def test_a_label_of_several_tokens_asks_once_at_each_node(site: Any) -> None:
    """In a vocabulary of bytes, `yes` and `no` are nodes `y`, `ye` and `n`, as well as `Y`, `Ye` and `N`."""
    reply = decide(site)
    ends = {prompt.rpartition("assistant:")[2] for prompt in prompts(site)}
    assert ends == {"", "y", "ye", "n", "Y", "Ye", "N"}
    (answer,) = reply.json["answers"]
    assert answer["probability"] < 1e-3  # three bytes against two
    assert set(answer) == {"type", "name", "probability", "x_label_mass"}


def test_scores_and_choices_have_probabilities_and_a_confidence(site: Any) -> None:
    choice, score = decide(site, {**CHOICE, "name": "n"}, SCORE).json["answers"]
    assert choice["probabilities"] == [{"value": "a", "probability": 0.5}, {"value": True, "probability": 0.5}]
    assert (choice["name"], choice["choice"], choice["confidence"]) == ("n", "a", 0.0)
    assert [entry["label"] for entry in score["probabilities"]] == ["low", "high"]
    assert (score["score"], score["confidence"]) == (0.5, 0.0)


def test_255_choices_have_labels_of_two_letters(site: Any) -> None:
    site.engine.info = msgspec.structs.replace(site.engine.info, max_model_len=4000)
    reply = decide(site, {**CHOICE, "choices": [{"value": str(i)} for i in range(255)]})
    assert len(reply.json["answers"][0]["probabilities"]) == 255
    assert [prompt[-1] for prompt in prompts(site)] == list(":ABCDEFGHIJ")
    assert "\nJU: 254\nAnswer with the letters of one option only." in prompts(site)[0]


def test_few_requests_run_at_a_time(site: Any) -> None:
    """Half of what the engine runs at once, which is 8 here."""
    running: list[int] = []
    generate = site.engine.generate

    async def counted(request: Any) -> Any:
        generation = await generate(request)
        running.append(sum(not asked.generation.closed.is_set() for asked in site.engine.asked))
        return generation

    site.engine.generate = counted
    assert decide(site, *[CHOICE] * 20).status == 200
    assert len(running) == 20
    assert max(running) == 4


def test_usage_is_the_sum_over_the_questions(site: Any) -> None:
    usage = decide(site, CHOICE, PREDICATE).json["usage"]
    num_tokens = sum(len(asked.prompt_token_ids) for asked in site.engine.asked[:2])
    assert usage["input_tokens"] == usage["total_tokens"] == num_tokens
    assert usage["input_tokens_details"]["cached_tokens"] == 8
    assert usage["output_tokens"] == usage["output_tokens_details"]["reasoning_tokens"] == 0


def test_a_low_label_mass_is_a_refusal(make_site: Any) -> None:
    site = make_site(decision_refusal_below=0.1)
    (answer,) = decide(site, {**CHOICE, "name": "n"}).json["answers"]
    assert answer == {"type": "refusal", "name": "n", "x_label_mass": pytest.approx(2 * 2.718281828**-9)}


def test_the_cache_fields_become_salt_and_pins(site: Any) -> None:
    part = {"type": "input_text", "text": "Hi there", "prompt_cache_breakpoint": {"mode": "explicit"}}
    options = {"mode": "explicit"}
    decide(site, CHOICE, input=[{"role": "user", "content": [part]}], cache_salt="k", prompt_cache_options=options)
    decide(site, CHOICE, CHOICE, prompt_cache_options=options)
    decide(site, CHOICE)
    pinned, *unshared, usual = (asked.request for asked in site.engine.asked)
    assert [pin.num_tokens for pin in pinned.caching.pins] == [len("user: Hi there") + 1]
    assert unshared[0].cache_salt == unshared[1].cache_salt != usual.cache_salt == ""
    assert pinned.cache_salt == "k"


def test_thinking_is_switched_off(site: Any) -> None:
    site.tokenizer.template = "{% if enable_thinking %}<think>{% endif %}</think>"
    site.rebuild()
    decide(site)
    assert site.tokenizer.variables == {"enable_thinking": False}


def nested(levels: int) -> Any:
    data: Any = {}
    for _ in range(levels - 1):
        data = {"a": data}
    return data


def user(part: Any) -> list[Any]:
    return [{"role": "user", "content": [part]}]


def as_json(data: Any) -> list[Any]:
    return user({"type": "input_json", "data": data})


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"questions": []}, "questions", "at least 1"),
        ({"questions": [PREDICATE] * 401}, "questions", "at most 400"),
        ({"questions": [CHOICE, {**CHOICE, "choices": [{"value": "a"}]}]}, "questions[1].choices", "at least 2"),
        (
            {"questions": [{**CHOICE, "choices": [{"value": str(i)} for i in range(256)]}]},
            "questions[0].choices",
            "at most 255",
        ),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]}, "questions[0].choices", "got 'a' twice"),
        (
            {"questions": [{**CHOICE, "choices": [{"value": v} for v in (True, "b", "c", "b", True)]}]},
            "questions[0].choices",
            "got True, 'b' twice",
        ),
        (
            {"questions": [{**SCORE, "levels": [{"label": "a"}, {"label": "b"}, {"label": "a", "description": "d"}]}]},
            "questions[0].levels",
            "must have different labels, got 'a' twice",
        ),
        ({"questions": [{**SCORE, "levels": [{"label": "Low"}, {"label": " low"}]}]}, "questions[0].levels", "'low'"),
        (
            {"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": " "}]}]},
            "questions[0].choices[1].value",
            "blank",
        ),
        ({"questions": [{**CHOICE, "choices": [{"value": 1}, {"value": "a"}]}]}, "questions[0].choices[0].value", "1"),
        ({"questions": [{**PREDICATE, "choices": CHOICE["choices"]}]}, "questions[0].choices", "type choice"),
        ({"questions": [{**CHOICE, "choices": None}]}, "questions[0].choices", "required"),
        ({"questions": [{**SCORE, "levels": [{"label": "a"}]}]}, "questions[0].levels", "at least 2"),
        ({"questions": [{**SCORE, "levels": [{"label": ""}] * 2}]}, "questions[0].levels[0].label", "blank"),
        ({"questions": [{**PREDICATE, "instructions": "\n"}]}, "questions[0].instructions", "blank"),
        ({"questions": [{**PREDICATE, "name": "x"}] * 2}, "questions[1].name", "'x'"),
        ({"questions": [{**PREDICATE, "type": "essay"}]}, "questions[0].type", "'essay'"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions", "required"),
        ({"input": " "}, "input", "blank"),
        ({"input": []}, "input", "at least 1"),
        ({"input": "x" * 2000}, "input", "1000 tokens"),
        ({"input": [{"role": "user"}]}, "input[0].content", "required"),
        ({"input": [{"content": "x"}]}, "input[0].role", "required"),
        ({"input": user({"type": "input_image", "image_url": "x"})}, "input[0].content[0]", "input_image"),
        ({"input": user({"type": "output_text", "text": "x"})}, "input[0].content[0].type", "input_json"),
        ({"input": as_json(5)}, "input[0].content[0].data", "object"),
        ({"input": as_json([{}, 5])}, "input[0].content[0].data", "object"),
        ({"input": as_json(nested(33))}, "input[0].content[0].data", "between 0 and 32, got 33"),
        ({"input": as_json({"a": [0] * 10_000})}, "input[0].content[0].data", "between 0 and 10000, got 10002"),
        ({"input": as_json({"a": "x" * (256 << 10)})}, "input[0].content[0].data", "between 0 and 262144"),
        ({"input": as_json({"a": "\ud800"})}, "input[0].content[0].data.a", "surrogates"),
        ({"input": [{**CALL, "type": "function_call_output", "output": "x"}]}, "input[0].call_id", "'c'"),
        (
            {"input": [CALL, {"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]},
            "input[1].call_id",
            "earlier custom_tool_call",
        ),
        ({"input": [{**CALL, "name": None}]}, "input[0].name", "required"),
        ({"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl", "30m"),
    ],
)
def test_bad_input(site: Any, body: dict[str, Any], param: str, words: str) -> None:
    data = json.dumps({"input": "Hi", "questions": [PREDICATE], **body})
    reply = site.call("POST", "/v1/decisions", content=data, headers={"content-type": "application/json"})
    assert (reply.status, reply.error["param"]) == (400, param), reply.text
    assert words in reply.error["message"]
    assert site.engine.asked == []


def test_json_within_its_bounds_is_taken(site: Any) -> None:
    assert decide(site, input=as_json(nested(32))).status == 200
    assert decide(site, input=as_json([{"a": None}, {}])).status == 200


def test_a_disconnect_aborts_what_runs_and_the_rest_is_never_sent(site: Any) -> None:
    site.engine.may_go_on = lambda num_read: False
    body = json.dumps({"input": "Hi", "questions": [CHOICE] * 400}).encode()
    fields = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with site.live() as base_url:
        with socket.create_connection(("127.0.0.1", int(base_url.rpartition(":")[2]))) as connection:
            connection.sendall(f"POST /v1/decisions HTTP/1.1\r\n{fields}".encode() + body)
            deadline = time.monotonic() + 60
            while len(site.engine.asked) < 4:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert all(asked.generation.closed.wait(60) for asked in site.engine.asked)
        assert len(site.engine.asked) == 4
