"""What the demo model can do, asked over HTTP in words and of values that its training never used."""

import asyncio

import httpx
import pytest

from benchmarks.demo_model import score
from tests.end_to_end.conftest import TIMEOUT_S, LiveServer

NUMBER = 20
LEAST_RIGHT = {
    "greeting": 15,
    "identity": 18,
    "abilities": 5,
    "thanks": 18,
    "farewell": 10,
    "knowledge": 18,
    "refusal": 16,
    "memory": 18,
    "story": 18,
    "emoji": 10,
    "accents": 16,
    "addition": 7,
    "subtraction": 3,
    "thinking": 10,
    "counting": 15,
    "sorting numbers": 13,
    "sorting words": 9,
    "reversing": 15,
    "capitals": 13,
    "tool call": 5,
    "tool result": 14,
    "schema": 9,
    "repeating": 15,
}
"""Of `NUMBER`: a sample, with room for another machine's rounding. The whole exam, with the skills that have not been
learned yet, stands in CHANGELOG.md."""


@pytest.mark.parametrize("skill", LEAST_RIGHT)
def test_skills_hold_for_what_was_never_trained(live_server: LiveServer, skill: str) -> None:
    async def examine() -> list[object]:
        limits = httpx.Limits(max_connections=8)
        async with httpx.AsyncClient(base_url=live_server.base_url, limits=limits, timeout=TIMEOUT_S) as client:
            return list(await score.examine(client, skill, NUMBER))

    wrong = asyncio.run(examine())
    assert NUMBER - len(wrong) >= LEAST_RIGHT[skill], wrong
