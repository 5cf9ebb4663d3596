from typing import Any


def content(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_plain_answer(site: Any) -> None:
    reply = site.chat()
    assert reply.status == 200
    answer = reply.json
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "org/fake model"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hällo, wörld!", "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    num_prompt = len("user: Hi\nassistant:") + 1
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


def test_stream(site: Any) -> None:
    reply = site.chat(stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    events = reply.events
    print(reply.text)
    assert content(events) == "Hällo, wörld!"
