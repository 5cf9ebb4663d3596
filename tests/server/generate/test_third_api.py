"""The pipeline serves an API that it has never heard of."""

from typing import Any

import pytest

from tests.chat_templates_for_tests import QWEN3
from tests.server import lines_api
from weft.server.errors import EngineDiedError

CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
END = "End <FinishReason.STOP: 0>"


@pytest.fixture
def site(site: Any) -> Any:
    site.tokenizer.template = QWEN3
    site.rebuild()
    site.app.include_router(lines_api.router)
    site.engine.answers, site.engine.chunk = [f"<think>\nwell\n</think>\n\nLook.\n{CALL}\n{CALL}"], 1000
    return site


def test_a_stream_has_every_event_in_order(site: Any) -> None:
    reply = site.call("POST", "/lines/streamed", content="alias: Hi")
    assert reply.text.splitlines() == [
        "Reasoning 'well'",
        "Text 'Look.'",
        *["CallOpened 'weather'", "CallArguments '{}'", "CallClosed 'weather'"] * 2,
        END,
        f"Tokens {len(site.engine.answers[0]) + 1}",
        "Bye '!'",
    ]
    (asked,) = site.engine.asked
    assert bytes(asked.input.token_ids[1:]) == b"user: Hi\nassistant:"


def test_a_plain_answer_joins_them(site: Any) -> None:
    reply = site.call("POST", "/lines/plain", content="alias: Hi")
    calls = ["CallClosed 'weather'"] * 2
    assert reply.text.splitlines()[:-1] == ["Reasoning 'well'", "Text 'Look.'", *calls, END]


def test_a_failure_in_a_stream_is_told_its_own_way(site: Any) -> None:
    site.engine.error, site.engine.error_after = EngineDiedError(), 0
    assert site.call("POST", "/lines/streamed", content="alias: Hi").text == "Sorry 503\n"
    site.engine.error = ValueError("secret")
    assert site.call("POST", "/lines/streamed", content="alias: Hi").text == "Sorry 500\n"


def test_a_failure_before_the_stream_is_the_error_object(site: Any) -> None:
    assert site.call("POST", "/lines/plain", content="other: Hi").error["code"] == "model_not_found"
    assert site.call("POST", "/lines/plain", content="alias: " + "x" * 2000).error["code"] == "context_length_exceeded"
