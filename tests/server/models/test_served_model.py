"""Several models in one server: another engine behind another name, and an adapter of the first."""

from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from tests.chat_templates_for_tests import QWEN3
from tests.server.conftest import BOS, ByteTokenizer, FakeEngine
from weft.engine.wire.options import Adapter
from weft.engine.wire.status_page import Status
from weft.server.app.app import create_app
from weft.server.models.served_model import served_model


class UpperTokenizer(ByteTokenizer):
    """Another vocabulary: each letter is the id of its other case."""

    def encode(self, text: str, *options: Any) -> list[int]:
        return super().encode(text.swapcase(), *options)

    def detokenizer(self, *options: Any, **more: Any) -> Any:
        inner = super().detokenizer()
        feed = inner.feed
        inner.feed = lambda token_id: feed(token_id).swapcase()
        return inner


LORA = Adapter("tuned", "/lora", "0")


@pytest.fixture
def site(site: Any) -> Any:
    """The models "first" (alias "1"), "second" with an engine of its own, and "tuned", an adapter of the first."""
    first = served_model(site.engine, site.tokenizer, site.settings)
    site.second = FakeEngine(answers=["Second"])
    site.second.info = msgspec.structs.replace(site.second.info, max_model_len=64)
    tokenizer = UpperTokenizer()
    tokenizer.template = QWEN3
    second = served_model(site.second, tokenizer, site.settings)
    models = {
        "first": replace(first, name="first"),
        "1": replace(first, name="first"),
        "second": replace(second, name="second"),
        "tuned": replace(first, name="first", adapter=LORA),
    }
    site.app = create_app(models, site.settings)
    return site


@pytest.mark.parametrize("stream", [False, True])
def test_each_name_is_answered_by_its_own_engine_and_tokenizer(site: Any, stream: bool) -> None:
    def texts(model: str | None) -> tuple[str, str]:
        reply = site.complete(model=model, stream=stream)
        answers = reply.events if stream else [reply.json]
        return "".join(choice["text"] for a in answers for choice in a["choices"]), answers[0]["model"]

    assert texts("first") == ("Hällo, wörld!", "first")
    assert texts("1") == ("Hällo, wörld!", "1")
    assert texts(None) == ("Hällo, wörld!", "first")
    assert texts("second") == ("sECOND", "second")
    assert [asked.input.token_ids for asked in site.engine.asked] == [[BOS, *b"Hi"]] * 3
    assert [asked.input.token_ids for asked in site.second.asked] == [[BOS, *b"hI"]]


def test_an_adapter_is_a_name_that_the_engine_is_told(site: Any) -> None:
    assert site.chat(model="tuned").json["model"] == "tuned"
    assert site.chat(model="first").status == 200
    assert [asked.adapter for asked in site.engine.asked] == [LORA, None]
    assert not site.second.asked


def test_formats_and_limits_are_those_of_the_model(site: Any) -> None:
    site.second.answers = ["<THINK>a</THINK>b"]
    message = site.chat(model="second").json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("A", "B")
    site.engine.answers = ["<think>a</think>b"]
    assert site.chat(model="first").json["choices"][0]["message"]["content"] == "<think>a</think>b"
    assert site.complete(model="second", prompt="x" * 64).error["code"] == "context_length_exceeded"
    assert site.complete(model="first", prompt="x" * 64).status == 200
    tokenized = site.call("POST", "/tokenize", json={"model": "second", "prompt": "Hi"}).json
    assert (tokenized["tokens"], tokenized["max_model_len"]) == ([BOS, *b"hI"], 64)


def test_all_names_are_listed(site: Any) -> None:
    models = site.call("GET", "/v1/models").json["data"]
    assert [(model["id"], model["root"], model["max_model_len"]) for model in models] == [
        ("first", "first", 1000),
        ("1", "first", 1000),
        ("second", "second", 64),
        ("tuned", "/lora", 1000),
    ]
    assert site.chat(model="third").error["message"].endswith("served here: first, 1, second, tuned")


def test_an_engine_that_is_away_is_missed_by_its_model_alone(site: Any) -> None:
    site.second.info = None
    assert site.chat(model="second").status == 503
    assert site.chat(model="first").status == 200
    assert site.call("GET", "/health").status == 503


def test_a_request_waits_for_the_engine_of_its_model_alone(site: Any) -> None:
    met: list[str] = []

    async def meet(name: str) -> None:
        met.append(name)

    site.engine.meet, site.second.meet = partial(meet, "first"), partial(meet, "second")
    for name, own in (("first", "first"), ("1", "first"), ("tuned", "first"), (None, "first"), ("second", "second")):
        for call in (
            partial(site.chat, model=name),
            partial(site.complete, model=name),
            partial(site.call, "POST", "/tokenize", json={"model": name, "prompt": "Hi"}),
            partial(site.call, "POST", "/detokenize", json={"model": name, "tokens": [97]}),
            partial(site.call, "GET", f"/v1/models/{name or 'first'}"),
        ):
            met.clear()
            assert call().status == 200
            assert set(met) == {own}


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models"])
def test_a_report_about_the_server_waits_for_each_engine_once(site: Any, path: str) -> None:
    met: list[str] = []

    async def meet(name: str) -> None:
        met.append(name)

    site.engine.meet, site.second.meet = partial(meet, "first"), partial(meet, "second")
    assert site.call("GET", path).status == 200
    assert met == ["first", "second"]


def test_headers_and_metrics_name_the_model_that_was_asked(site: Any) -> None:
    site.engine.page, site.second.page = Status(num_steps=5), Status(num_steps=7)

    def header(model: str | None) -> str:
        name: str = site.chat(model=model).headers["openai-model"]
        return name

    names = (None, "1", "tuned", "second", "second", "third")
    assert [header(name) for name in names] == ["first", "first", "first", "second", "second", "first"]
    assert site.call("GET", "/version").headers["openai-model"] == "first"
    assert site.call("GET", "/v1/models/second").headers["openai-model"] == "second"
    retry = {"x-stainless-retry-count": "2"}
    site.call("POST", "/v1/completions", json={"model": "second", "prompt": "Hi"}, headers=retry)
    lines = site.call("GET", "/metrics").text.splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert samples['weft:e2e_request_latency_seconds_count{model_name="first"}'] == "3.0"
    assert samples['weft:e2e_request_latency_seconds_count{model_name="second"}'] == "3.0"
    assert samples['weft:request_success_total{finished_reason="stop",model_name="first"}'] == "3.0"
    assert samples['weft:inter_token_latency_seconds_count{model_name="second"}'] == "18.0"
    assert [name for name in samples if name.startswith("weft:request_retries_total")] == [
        'weft:request_retries_total{model_name="second",retry="2"}'
    ]
    assert samples['weft:engine_steps_total{model_name="first"}'] == "5.0"
    assert samples['weft:engine_steps_total{model_name="second"}'] == "7.0"
    heads = [line for line in lines if line.startswith("# TYPE")]
    assert len(set(heads)) == len(heads)


def test_there_must_be_a_model(site: Any) -> None:
    with pytest.raises(ValueError, match="at least one name"):
        create_app({}, site.settings)
