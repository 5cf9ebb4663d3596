"""Shortens a conversation that does not fit: the oldest turns are left out, never the instructions or the question."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.server.task.task import Chat

_KEPT_ROLES = frozenset({"system", "developer"})


def shortened(chat: Chat, fits: Callable[[Chat], bool]) -> Chat:
    """The chat itself, or the longest of its shorter forms that fits; the shortest of them if none does.

    A shorter form begins with a later message of the user, or keeps the last one of these and begins with a later
    answer to it. Outputs of calls stay with their calls. `fits` is asked a logarithmic number of times.
    """
    if fits(chat):
        return chat
    cuts = _cuts(chat.messages)
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if fits(_cut(chat, *cuts[middle])):
            high = middle
        else:
            low = middle + 1
    return _cut(chat, *cuts[low]) if cuts else chat


def _cuts(messages: list[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Where each shorter form begins, and the question that is kept before it; the longest form first."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        return []
    last = users[-1]
    answers = [i for i in range(last + 1, len(messages)) if messages[i]["role"] == "assistant"]
    return [*((i, []) for i in users[1:] or users), *((i, [messages[last]]) for i in answers[1:])]


def _cut(chat: Chat, start: int, question: list[dict[str, Any]]) -> Chat:
    kept = [message for message in chat.messages[:start] if message["role"] in _KEPT_ROLES]
    return replace(chat, messages=[*kept, *question, *chat.messages[start:]], breakpoints=())
