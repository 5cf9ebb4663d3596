"""max_tokens is an upper bound on every route: what the context has no room for is cut, or refused if strict."""

from typing import Any

import pytest

from tests.server.conftest import MAX_MODEL_LEN

ASK = [{"role": "user", "content": "Hi"}]
ROUTES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": ASK}, "max_tokens"),
    "chat, its newer name": ("/v1/chat/completions", {"messages": ASK}, "max_completion_tokens"),
    "completions": ("/v1/completions", {"prompt": "Hi"}, "max_tokens"),
    "responses": ("/v1/responses", {"input": "Hi", "store": False}, "max_output_tokens"),
    "messages": ("/v1/messages", {"messages": ASK}, "max_tokens"),
    "ollama's chat": ("/api/chat", {"messages": ASK, "stream": False}, "num_predict"),
    "ollama's generate": ("/api/generate", {"prompt": "Hi", "stream": False}, "num_predict"),
    "llama.cpp's": ("/completion", {"prompt": "Hi"}, "n_predict"),
}


def send(site: Any, route: str, value: int) -> Any:
    path, body, name = ROUTES[route]
    field = {"options": {name: value}} if name == "num_predict" else {name: value}
    return site.call("POST", path, json={**body, **field})


@pytest.mark.parametrize("route", ROUTES)
def test_what_the_context_has_no_room_for_is_cut(make_site: Any, route: str) -> None:
    for value in (MAX_MODEL_LEN - 1, MAX_MODEL_LEN, 65535, 2**31):
        site = make_site()
        assert send(site, route, value).status == 200
        (request,) = site.engine.asked
        assert request.params.max_tokens == MAX_MODEL_LEN - len(request.input.token_ids)
        strict = make_site(strict_params=True)
        assert send(strict, route, value).status == 400
        assert not strict.engine.asked


@pytest.mark.parametrize("route", ROUTES)
def test_what_fits_stays(make_site: Any, route: str) -> None:
    for strict in (False, True):
        site = make_site(strict_params=strict)
        assert send(site, route, 9).status == 200
        assert site.engine.asked[0].params.max_tokens == 9


def test_the_least_number_is_cut_with_it(site: Any) -> None:
    assert site.chat(max_tokens=65535, min_tokens=MAX_MODEL_LEN, ignore_eos=True).status == 200
    params = site.engine.asked[0].params
    assert params.min_tokens == params.max_tokens < MAX_MODEL_LEN


def test_conversations_are_shortened_for_no_more_than_there_is(site: Any) -> None:
    items = [{"role": role, "content": f"{i} {'x' * 150}"} for i in range(6) for role in ("user", "assistant")]
    kept = []
    for value in (None, 65535):
        body = {"input": items, "truncation": "auto", "max_output_tokens": value, "store": False}
        assert site.call("POST", "/v1/responses", json=body).status == 200
        kept.append([*site.tokenizer.rendered])
    assert kept[0] == kept[1] and len(kept[0]) > 2
