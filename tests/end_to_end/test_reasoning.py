"""A model that thinks: the demo model behind a template that knows thinking, so what it thinks is anything."""

import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.chat_templates_for_tests import QWEN3
from tests.end_to_end.conftest import serving
from tests.engine.guidance.demo import DEMO_MODEL, TOKENIZER

ASK: Any = [{"role": "user", "content": "Tell me something"}]
YES_OR_NO: Any = {"structured_outputs": {"choice": ["yes", "no"]}}
NO_END: Any = {str(TOKENIZER.token_to_id(token)): -100 for token in ("</think>", "<|im_end|>")}
"""As a `logit_bias`: the model ends neither its thinking nor its answer by itself."""
NUM_AROUND = 8
"""Tokens that count as reasoning besides those that it may take: markers, newlines, the rest of a character."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("thinking")
    checkpoint = pathlib.Path(shutil.copytree(DEMO_MODEL, folder / "thinker"))
    (checkpoint / "chat_template.jinja").write_text(QWEN3)
    with (
        serving(folder / "server.log", str(checkpoint), "--dtype", "float32") as server,
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        yield sdk


def settings(client: openai.OpenAI, extra: dict[str, Any], **more: Any) -> dict[str, Any]:
    model = client.models.list().data[0].id
    return {
        "model": model,
        "messages": ASK,
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 120,
        "extra_body": extra,
        **more,
    }


def plain(client: openai.OpenAI, extra: dict[str, Any], **more: Any) -> tuple[str, str, str | None, int]:
    """What was thought, what was said, why it ended, how many tokens were spent on thinking."""
    answer = client.chat.completions.create(**settings(client, extra, **more))
    (choice,) = answer.choices
    fields = choice.message.model_extra or {}
    assert fields.get("reasoning") == fields.get("reasoning_content")
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    spent = answer.usage.completion_tokens_details.reasoning_tokens or 0
    return fields.get("reasoning_content") or "", choice.message.content or "", choice.finish_reason, spent


def streamed(client: openai.OpenAI, extra: dict[str, Any], **more: Any) -> tuple[str, str, str | None, int]:
    thought, said, reason, spent = "", "", None, -1
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**settings(client, extra, **more), stream=True, stream_options=options):
        if chunk.usage is not None and chunk.usage.completion_tokens_details is not None:
            spent = chunk.usage.completion_tokens_details.reasoning_tokens or 0
        for choice in chunk.choices:
            fields = choice.delta.model_extra or {}
            assert fields.get("reasoning") == fields.get("reasoning_content")
            assert not (said and fields.get("reasoning_content")), "content came before reasoning was over"
            thought += fields.get("reasoning_content") or ""
            said += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return thought, said, reason, spent


@pytest.mark.parametrize("budget", [0, 5, 30])
def test_a_budget_ends_the_thinking_and_the_answer_follows(client: openai.OpenAI, budget: int) -> None:
    body = {"thinking_token_budget": budget, **YES_OR_NO, "logit_bias": NO_END}
    thought, said, reason, spent = plain(client, body)
    assert bool(thought) == (budget > 0)
    assert said in ("yes", "no")
    assert reason == "stop"
    assert budget <= spent <= budget + NUM_AROUND
    assert streamed(client, body) == (thought, said, reason, spent)


def test_thinking_switched_off_leaves_the_answer(client: openai.OpenAI) -> None:
    thought, said, reason, spent = plain(client, YES_OR_NO, reasoning_effort="none")
    assert (thought, said in ("yes", "no"), reason, spent) == ("", True, "stop", 0)
    assert plain(client, {**YES_OR_NO, "chat_template_kwargs": {"enable_thinking": False}}) == (
        thought,
        said,
        reason,
        0,
    )


def test_calls_come_after_the_thinking(client: openai.OpenAI) -> None:
    no_call_at_once = {str(TOKENIZER.token_to_id("<tool_call>")): -100}
    body = {"thinking_token_budget": 10, "logit_bias": NO_END | no_call_at_once}
    tools: Any = [{"type": "function", "function": {"name": "time"}}]
    answer = client.chat.completions.create(
        **settings(client, body, tools=tools, tool_choice="required", parallel_tool_calls=False)
    )
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls or []
    assert (call.function.name, call.function.arguments, choice.finish_reason) == ("time", "{}", "tool_calls")
    assert (choice.message.model_extra or {})["reasoning_content"]


def test_thinking_that_is_not_shown_is_still_counted(client: openai.OpenAI) -> None:
    body = {"thinking_token_budget": 10, **YES_OR_NO, "logit_bias": NO_END}
    thought, said, _, spent = plain(client, {**body, "include_reasoning": False})
    assert (thought, said in ("yes", "no")) == ("", True)
    assert spent == plain(client, body)[3] > 0
