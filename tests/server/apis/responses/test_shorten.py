"""Shorter forms of a conversation are made one at a time, as they are asked for."""

import tracemalloc

import pytest

from weft.server.apis.responses.input import shortened
from weft.server.task.task import Chat
from weft.server.text.chat_template import TemplateOptions


@pytest.mark.parametrize("first", ["user", "assistant"])
def test_a_long_conversation_is_not_copied_for_each_of_its_turns(first: str) -> None:
    """Its forms, all made before the first was tried, took the square of its length: a gigabyte for 16,384 messages."""
    roles = ["system", "user", *[first, "assistant"] * 4095]
    chat = Chat([{"role": role, "content": str(i)} for i, role in enumerate(roles)], TemplateOptions())
    tracemalloc.start()
    try:
        short = shortened(chat, lambda chat: len(chat.messages) <= 100)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [message["content"] for message in short.messages[:2]] == ["0", "8094" if first == "user" else "1"]
    assert 98 <= len(short.messages) <= 100
    assert peak < 1000 * len(roles)
