from typing import Any

from tests.chat_templates_for_tests import QWEN3
from weft.engine.wire.status_page import Status

ENGINE: Any = {
    "num_requests_running": 3,
    "num_requests_waiting": 4,
    "num_blocks": 100,
    "num_used_blocks": 25,
    "num_cached_blocks": 10,
    "prompt_tokens": 5,
    "generation_tokens": 6,
    "prefix_cache_queries": 7,
    "prefix_cache_hits": 8,
    "num_preemptions": 9,
    "num_steps": 11,
    "step_seconds": 2.5,
    "prefill_tokens": 15,
    "decode_tokens": 16,
}


def test_the_engine_as_its_status_page_says(site: Any) -> None:
    site.engine.page = Status(is_ready=1, **ENGINE)
    reply = site.call("GET", "/stats")
    assert reply.headers["cache-control"] == "no-store"
    assert {k: v for k, v in reply.json.items() if k not in ("engine", "version")} == {
        "model": "org/fake model",
        "is_ready": True,
        "max_model_len": 1000,
        "has_tools": False,
        "mcp_servers": [],
        "thinking": None,
        "input_modalities": ["text"],
    }
    assert reply.json["engine"] == ENGINE


def test_what_the_template_can(site: Any) -> None:
    site.tokenizer.template = QWEN3
    site.rebuild()
    stats = site.call("GET", "/stats").json
    assert stats["has_tools"] is True
    assert stats["thinking"] == {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}}


def test_a_model_is_asked_for_by_name(site: Any) -> None:
    assert site.call("GET", "/stats?model=org/fake%20model").json["model"] == "org/fake model"
    assert site.call("GET", "/stats?model=other").status == 404


def test_without_an_engine_it_still_answers(site: Any) -> None:
    site.engine.info = None
    stats = site.call("GET", "/stats").json
    assert [stats[name] for name in ("is_ready", "max_model_len", "input_modalities")] == [False, None, None]


def test_it_asks_for_the_key(make_site: Any) -> None:
    assert make_site(api_key=("secret",)).call("GET", "/stats").status == 401
