"""No integer that a client sends breaks the message to the engine: it is taken, or refused as the client's fault."""

import itertools
from typing import Any

import pytest

from tests.chat_templates_for_tests import QWEN3
from weft.engine.wire.messages import AddRequest, decode_to_engine, encode
from weft.server.task.bodies import ChatCompletionBody, CompletionBody

INTEGERS = [-1, 0, 2**31, 2**53, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**20, -(10**20), 10**400]


def numeric_fields(body: Any) -> list[str]:
    """Fields that take a number, also within a list or an object."""
    return [name for name, field in body.model_fields.items() if {"int", "float"} & words(str(field.annotation))]


def words(text: str) -> set[str]:
    return set("".join(char if char.isalnum() else " " for char in text).split())


CASES = [
    *itertools.product(["/v1/chat/completions"], numeric_fields(ChatCompletionBody)),
    *itertools.product(["/v1/completions"], numeric_fields(CompletionBody)),
]


@pytest.mark.parametrize(("path", "name"), CASES)
def test_any_integer_is_taken_or_refused(make_site: Any, path: str, name: str) -> None:
    """`thinking_token_budget: 10**20` was a 500, and made an idle server unhealthy."""
    site = make_site()
    site.tokenizer.template = QWEN3
    site.tokenizer.added_ids = {"<think>": 290, "</think>": 291}
    generate = site.engine.generate

    async def generate_what_arrives(request: AddRequest) -> Any:
        message = decode_to_engine(encode(request)[4:])
        assert isinstance(message, AddRequest)
        return await generate(message)

    site.engine.generate = generate_what_arrives
    site.rebuild()
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    for number in INTEGERS:
        for value in (number, [number], {"1": number}):
            fields = {"prompt": "Hi"} if "chat" not in path else chat
            reply = site.call("POST", path, json={**fields, name: value})
            assert reply.status in (200, 400), f"{name}={value}: {reply.text}"


def test_an_integer_beyond_the_wire_is_named_with_its_bound(make_site: Any) -> None:
    error = make_site().chat(thinking_token_budget=10**20).error
    assert error["param"] == "thinking_token_budget"
    assert f"less than or equal to {2**64 - 1}, got {10**20}" in error["message"]
