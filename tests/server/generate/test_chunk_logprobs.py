"""A chunk may hold several tokens: outputs merge while the reader is slow. Its logprobs are those of its text."""

import json
from typing import Any

import pytest

ANSWER = "Hällo, wörld! ✓ 3 + 4"


def data_of(reply: Any) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]


def chunks(site: Any, route: str) -> list[tuple[str, list[str], list[list[int]]]]:
    """The text of each chunk, and the texts and bytes of its tokens."""
    if route == "chat":
        reply = site.chat(stream=True, logprobs=True)
        choices = [chunk["choices"][0] for chunk in data_of(reply)]
        found = [(c["delta"].get("content") or "", (c.get("logprobs") or {}).get("content") or []) for c in choices]
    else:
        body = {"input": "Hi", "store": False, "stream": True, "include": ["message.output_text.logprobs"]}
        events = data_of(site.call("POST", "/v1/responses", json=body))
        found = [(e["delta"], e["logprobs"]) for e in events if e["type"] == "response.output_text.delta"]
    return [(text, [each["token"] for each in tokens], [each["bytes"] for each in tokens]) for text, tokens in found]


@pytest.mark.parametrize("route", ["chat", "responses"])
@pytest.mark.parametrize("per_output", [1, 2, 3, 7, 1000])
def test_the_tokens_of_a_chunk_make_up_its_text(site: Any, route: str, per_output: int) -> None:
    site.engine.answers, site.engine.chunk = [ANSWER], per_output
    found = chunks(site, route)
    assert "".join(text for text, _, _ in found) == ANSWER
    for text, _, pieces in found:
        assert bytes(byte for piece in pieces for byte in piece or ()).decode() == text
    assert sum(len(tokens) for _, tokens, _ in found) == len(ANSWER.encode())
