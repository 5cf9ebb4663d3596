from collections.abc import Mapping
from typing import Any

import pytest

from weft.server.apis.openai.chat import REFUSED_IN_CHAT
from weft.server.apis.openai.completions import REFUSED_IN_COMPLETIONS
from weft.server.apis.openai.tokenize import REFUSED_IN_TOKENIZE
from weft.server.task import validation as fields

ASKING: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "root ::= a",
    "prediction": {"type": "content", "content": "a"},
    "thinking_token_budget": 5,
    "reasoning_budget_tokens": 5,
    "moderation": {},
    "tools": [],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "parallel_tool_calls": "yes",
    "reasoning_effort": "none",
    "reasoning": {"effort": "low"},
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "echo": True,
    "best_of": 2,
    "modalities": ["text", "audio"],
    "audio": {"voice": "a"},
    "web_search_options": {},
}


def plain(refused: Mapping[str, object]) -> list[str]:
    """The fields themselves; members of fields have tests where these have theirs."""
    return sorted(name for name in refused if "." not in name)


@pytest.mark.parametrize("name", plain(REFUSED_IN_CHAT))
def test_chat_refuses_what_it_does_not_honour(site: Any, name: str) -> None:
    check_refused(site, site.chat(**{name: ASKING[name]}), name)


@pytest.mark.parametrize("name", plain(REFUSED_IN_COMPLETIONS))
def test_completions_refuse_what_they_do_not_honour(site: Any, name: str) -> None:
    check_refused(site, site.complete(**{name: ASKING[name]}), name)


@pytest.mark.parametrize("name", sorted(REFUSED_IN_TOKENIZE))
def test_tokenize_refuses_what_it_does_not_honour(site: Any, name: str) -> None:
    check_refused(site, site.call("POST", "/tokenize", json={"prompt": "a", name: ASKING[name]}), name)


def check_refused(site: Any, reply: Any, name: str) -> None:
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == ("unsupported_parameter", name)
    assert name in reply.error["message"]
    assert not site.engine.asked


@pytest.mark.parametrize("name", sorted(REFUSED_IN_CHAT))
def test_a_value_that_asks_for_nothing_is_fine(site: Any, name: str) -> None:
    for value in REFUSED_IN_CHAT[name]:
        reply = site.chat(**{name: value})
        assert reply.status == 200
        assert "x-ignored-params" not in reply.headers


def test_an_integer_equal_to_a_neutral_number_asks_for_nothing(site: Any) -> None:
    assert site.chat(length_penalty=1).status == 200


def test_ignored_fields_are_named(site: Any) -> None:
    reply = site.chat(
        user="me",
        store=True,
        metadata={"a": "b"},
        verbosity="low",
        safety_identifier="s",
        prompt_cache_retention="24h",
        made_up=1,
        stream_options=None,
        messages=[{"role": "user", "content": [{"type": "text", "text": "a", "odd": 1}], "strange": None, "wild": 2}],
    )
    assert reply.status == 200
    assert set(reply.headers["x-ignored-params"].split(",")) == {
        *("user", "store", "metadata", "verbosity", "safety_identifier", "prompt_cache_retention", "made_up"),
        *("messages[0].content[0].odd", "messages[0].wild"),
    }


def test_null_is_absent(site: Any) -> None:
    body = {"user": None, "temperature": None, "stop": None, "n": None, "made_up": None, "stream": None, "model": None}
    assert "x-ignored-params" not in site.chat(**body).headers


def test_names_cannot_break_the_header(site: Any) -> None:
    names = {"a\r\nset-cookie: x": 1, "é": 1, **{f"f{i}": 1 for i in range(100)}}
    header = site.chat(**names).headers["x-ignored-params"]
    assert header.startswith("a%0D%0Aset-cookie%3A%20x,%C3%A9,f0,")
    assert len(header.split(",")) == 32


def test_only_what_the_header_shows_of_a_name_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of 30 MiB was quoted whole, which held the event loop up for 1.6 seconds."""
    lengths: list[int] = []
    monkeypatch.setattr(fields, "quote", lambda name, **_: lengths.append(len(name)) or name)
    assert fields.ignored_header([" " * 10_000]) == {"x-ignored-params": " " * 128}
    assert lengths == [128]


def test_streams_name_them_too(site: Any) -> None:
    assert site.chat(stream=True, made_up=1).headers["x-ignored-params"] == "made_up"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"made_up": 1}, "made_up"),
        ({"messages": [{"role": "user", "content": "a", "odd": 1}]}, "messages[0].odd"),
        ({"stream": True, "stream_options": {"odd": 1}}, "stream_options.odd"),
    ],
)
def test_strict_mode_refuses_unknown_fields(make_site: Any, body: Any, param: str) -> None:
    reply = make_site(strict_params=True).chat(**body)
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == ("unknown_parameter", param)


def test_strict_mode_still_accepts_known_fields(make_site: Any) -> None:
    assert make_site(strict_params=True).chat(user="me", service_tier="auto").headers["x-ignored-params"] == "user"


def test_the_order_of_ignored_fields_is_fixed(site: Any) -> None:
    """It was that of a set of strings, which differs between the server processes of one server."""
    reply = site.chat(store=True, b=1, user="u", verbosity="low", a=1, safety_identifier="s", metadata={})
    assert reply.headers["x-ignored-params"] == "b,a,user,safety_identifier,metadata,store,verbosity"
