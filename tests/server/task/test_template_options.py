from typing import Any

import pytest

OPEN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]


def asked(site: Any) -> bytes:
    return bytes(i for i in site.engine.asked[-1].input.token_ids if i < 256)


def test_the_prompt_ends_as_it_is_asked_to(site: Any) -> None:
    for body, end in (
        ({}, b"Well\nassistant:"),
        ({"add_generation_prompt": False}, b"Well\n"),
        ({"continue_final_message": True}, b"Well"),
        ({"continue_final_message": True, "add_generation_prompt": False}, b"Well"),
    ):
        assert site.chat(messages=OPEN, **body).status == 200
        assert asked(site).endswith(b"assistant: " + end)
        tokens = site.call("POST", "/tokenize", json={"messages": OPEN, **body}).json["tokens"]
        assert tokens == site.engine.asked[-1].input.token_ids


def test_both_ends_at_once_are_refused(site: Any) -> None:
    body = {"messages": OPEN, "continue_final_message": True, "add_generation_prompt": True}
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = site.call("POST", path, json=body)
        assert reply.status == 400
        assert reply.error["param"] == "continue_final_message"


def test_documents_go_to_a_template_that_names_them(site: Any) -> None:
    documents = [{"title": "a", "text": "b"}]
    assert site.chat(documents=documents).error == {
        "message": "documents is not supported by this model: its chat template does not name them",
        "type": "invalid_request_error",
        "param": "documents",
        "code": "unsupported_parameter",
    }
    assert site.chat(documents=[]).status == 200
    site.tokenizer.template_variables = frozenset({"documents"})
    assert site.chat(documents=documents).status == 200
    assert site.tokenizer.variables == {"documents": documents}


def test_verbosity_is_honoured_or_reported(site: Any) -> None:
    assert site.chat(verbosity="low").headers["x-ignored-params"] == "verbosity"
    assert site.tokenizer.variables == {}
    site.tokenizer.template_variables = frozenset({"verbosity", "user"})
    assert site.chat(verbosity="low", user="me").headers["x-ignored-params"] == "user"
    assert site.tokenizer.variables == {"verbosity": "low"}


@pytest.mark.parametrize("stream", [False, True])
def test_prewarm_computes_the_prompt_alone(site: Any, stream: bool) -> None:
    for reply in (site.chat(prewarm=True, stream=stream), site.complete(prewarm=True, stream=stream)):
        assert reply.status == 200
        last = reply.events[-1] if stream else reply.json
        assert last["choices"][0]["finish_reason"] == "length"
        if not stream:
            assert last["usage"]["completion_tokens"] == 0
            assert last["usage"]["prompt_tokens"] > 0
    assert {asked.params.max_tokens for asked in site.engine.asked} == {0}


def test_a_retry_is_counted(site: Any) -> None:
    for count in ("0", "1", "7", "x"):
        body = {"messages": OPEN}
        site.call("POST", "/v1/chat/completions", json=body, headers={"x-stainless-retry-count": count})
    shown = site.call("GET", "/metrics").text
    lines = [line for line in shown.splitlines() if line.startswith("weft:request_retries_total")]
    assert sorted(line.split("retry=")[1] for line in lines) == ['"1"} 1.0', '"3+"} 1.0']
