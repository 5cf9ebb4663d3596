"""What is asked of the prompt and of the prefix cache, against the real engine and tokenizer."""

from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer, Serve


def post(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{server.base_url}{path}", json=body, timeout=TIMEOUT_S)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def chat(server: LiveServer, text: str, **body: Any) -> dict[str, Any]:
    return post(server, "/v1/chat/completions", messages=[{"role": "user", "content": text}], temperature=0, **body)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_prewarmed_prompt_is_in_the_cache(live_server: LiveServer) -> None:
    text = "Prewarm me. " * 20
    warm = chat(live_server, text, prewarm=True)
    assert (warm["usage"]["completion_tokens"], warm["choices"][0]["finish_reason"]) == (0, "length")
    assert warm["choices"][0]["message"]["content"] == ""
    assert cached(warm) == 0
    assert cached(chat(live_server, text, max_tokens=1)) >= 32


def test_an_explicit_request_neither_finds_nor_leaves_anything(live_server: LiveServer) -> None:
    text, explicit = "Nobody may see this. " * 20, {"mode": "explicit"}
    indexed = live_server.metric("weft:kv_cache_indexed_blocks")
    for _ in range(2):
        answer = chat(live_server, text, max_tokens=2, prompt_cache_options=explicit)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert live_server.metric("weft:kv_cache_indexed_blocks") == indexed
    assert cached(chat(live_server, text, max_tokens=1)) == 0


def test_a_breakpoint_outlives_the_prompts_of_others(serve: Serve) -> None:
    """The engine was not told pin_share, and pinned nothing; a hit right behind the first request hid that."""
    server = serve("--kv-cache-memory", "2MB", WEFT_PIN_SHARE="0.5")
    part = {"type": "text", "text": "Keep this. " * 20, "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "Not this."}]}]
    body = {"messages": messages, "max_tokens": 1, "prompt_cache_options": {"mode": "explicit"}}
    others = "Nobody asked to keep this. " * 10
    assert cached(post(server, "/v1/chat/completions", **body)) == 0
    assert cached(chat(server, others, max_tokens=1)) == 0
    assert cached(chat(server, others, max_tokens=1)) >= 32
    for number in range(12):  # each takes about a fifth of the cache
        chat(server, f"{number} " * 50, max_tokens=1)
    assert cached(post(server, "/v1/chat/completions", **body)) >= 32
    assert cached(chat(server, others, max_tokens=1)) == 0


def test_prompt_logprobs_are_those_of_echo(live_server: LiveServer) -> None:
    body = {"prompt": "Weft weaves threads", "max_tokens": 0, "echo": True, "logprobs": 2}
    (choice,) = post(live_server, "/v1/completions", **body, prompt_logprobs=2, return_token_ids=True)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    ids = choice["prompt_token_ids"][1:]
    logprobs = [entry[str(i)]["logprob"] for i, entry in zip(ids, others, strict=True)]
    assert logprobs == choice["logprobs"]["token_logprobs"][1:]
    assert all(sorted(e["rank"] for e in entry.values() if e["rank"])[:2] == [1, 2] for entry in others)


def test_asked_ids_have_the_logprobs_that_they_have_among_the_best(live_server: LiveServer) -> None:
    best = post(
        live_server, "/v1/completions", prompt="Weft", max_tokens=3, temperature=0, logprobs=5, return_token_ids=True
    )
    sampled = best["choices"][0]["token_ids"]
    asked = post(live_server, "/v1/completions", prompt="Weft", max_tokens=3, temperature=0, logprob_token_ids=sampled)
    for shown, token, logprob in zip(
        asked["choices"][0]["logprobs"]["top_logprobs"],
        best["choices"][0]["logprobs"]["tokens"],
        best["choices"][0]["logprobs"]["token_logprobs"],
        strict=True,
    ):
        assert shown[token] == pytest.approx(logprob, abs=1e-5)


def test_an_open_message_is_continued(live_server: LiveServer) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Once upon"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 1, "return_prompt_text": True}
    assert post(live_server, "/v1/chat/completions", **body)["prompt_text"].endswith("Once upon")


def test_the_best_beam_is_at_least_as_probable_as_the_greedy_output(live_server: LiveServer) -> None:
    """Of two tokens it cannot be otherwise: the first one of the greedy output is in the beam."""
    body = {"max_tokens": 2, "temperature": 0, "logprobs": 0, "ignore_eos": True, "prompt": "Weft is"}
    beams = post(live_server, "/v1/completions", **body, use_beam_search=True, n=4)["choices"]
    greedy = post(live_server, "/v1/completions", **body)["choices"][0]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in (*beams, greedy)]
    assert sums[:4] == sorted(sums[:4], reverse=True)
    assert sums[0] >= sums[4] - 1e-4


def test_a_search_sends_its_prompt_once(live_server: LiveServer) -> None:
    """The counters of prompt tokens grew by the prompt for every token of every beam."""
    names = ("weft:prompt_tokens", "weft:prefix_cache_queries", "weft:generation_tokens")
    before = [live_server.metric(f"{name}_total") for name in names]
    usage = post(live_server, "/v1/completions", prompt="Weft weaves. " * 50, max_tokens=5, use_beam_search=True, n=8)[
        "usage"
    ]
    counted = [live_server.metric(f"{name}_total") - value for name, value in zip(names, before, strict=True)]
    assert counted == [usage["prompt_tokens"], usage["prompt_tokens"], usage["completion_tokens"]]
    live_server.wait_for_metric("weft:num_requests_running", 0)
