from typing import Any

import pytest


def test_prompt(site: Any) -> None:
    reply = site.call("POST", "/tokenize", json={"prompt": "hé"})
    assert reply.json == {"count": 4, "max_model_len": 1000, "tokens": [256, 104, 195, 169], "token_strs": None}
    bare = site.call("POST", "/tokenize", json={"prompt": "h", "add_special_tokens": False, "return_token_strs": True})
    assert (bare.json["tokens"], bare.json["token_strs"]) == ([104], ["h"])


def test_messages(site: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tokens = site.call("POST", "/tokenize", json={"messages": messages}).json["tokens"]
    assert site.chat(messages=messages).json["usage"]["prompt_tokens"] == len(tokens)
    shorter = site.call("POST", "/tokenize", json={"messages": messages, "add_generation_prompt": False}).json
    assert shorter["tokens"] == tokens[: -len("assistant:")]


def test_round_trip(site: Any) -> None:
    tokens = site.call("POST", "/tokenize", json={"prompt": "hé"}).json["tokens"]
    assert site.call("POST", "/detokenize", json={"tokens": tokens}).json == {"prompt": "<256>hé"}


def test_the_engine_gets_the_rendered_ids(site: Any) -> None:
    """Truncated, and several prompts; what is refused there is refused here."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "truncate_prompt_tokens": 9, "max_tokens": 1}
    texts = {"prompt": ["a", "hé"], "max_tokens": 1}
    rendered = site.call("POST", "/v1/chat/completions/render", json=chat).json
    assert site.engine.asked == []
    several = site.call("POST", "/v1/completions/render", json=texts).json
    assert [set(one) for one in (rendered, *several)] == 3 * [{"request_id", "model", "token_ids"}]
    site.chat(**chat)
    site.complete(**texts)
    sent = [asked.prompt_token_ids for asked in site.engine.asked]
    assert [one["token_ids"] for one in (rendered, *several)] == sent
    refused = [
        site.call("POST", f"/v1/chat/completions{end}", json=chat | {"min_tokens": 9}).json for end in ("", "/render")
    ]
    assert refused[0]["error"]["param"] == "min_tokens"
    assert refused[0] == refused[1]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/detokenize", {"tokens": [1, 300]}, "tokens[1]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_refused(site: Any, path: str, body: Any, param: str) -> None:
    assert site.call("POST", path, json=body).error["param"] == param
