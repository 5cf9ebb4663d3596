"""What the demo model can do, asked over HTTP in words and of values that its training never used."""

import asyncio

import httpx
import pytest

from benchmarks.demo_model import score
from tests.end_to_end.conftest import TIMEOUT_S, LiveServer

NUMBER = 20
LEAST_RIGHT = {
    "greeting": 11,
    "identity": 12,
    "abilities": 8,
    "thanks": 17,
    "farewell": 10,
    "knowledge": 17,
    "refusal": 14,
    "memory": 14,
    "story": 15,
    "emoji": 17,
    "accents": 17,
    "addition": 11,
    "subtraction": 8,
    "thinking": 10,
    "counting": 17,
    "sorting numbers": 12,
    "reversing": 3,
    "capitals": 5,
    "tool result": 10,
    "schema": 4,
    "repeating": 11,
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
