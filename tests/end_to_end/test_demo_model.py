"""What the demo model can do, asked over HTTP in words and of values that its training never used."""

import asyncio

import httpx
import pytest

from benchmarks.demo_model import score
from benchmarks.demo_model.generate import EXAMINED_SKILLS
from tests.end_to_end.conftest import LiveServer

NUMBER = 20
LEAST_RIGHT = dict.fromkeys(EXAMINED_SKILLS, 18)
"""Of `NUMBER`. A sample: the whole exam stands in CHANGELOG.md."""


@pytest.mark.parametrize("skill", EXAMINED_SKILLS)
def test_skills_hold_for_what_was_never_trained(live_server: LiveServer, skill: str) -> None:
    async def examine() -> list[object]:
        limits = httpx.Limits(max_connections=8)
        async with httpx.AsyncClient(base_url=live_server.base_url, limits=limits, timeout=120) as client:
            return list(await score.examine(client, skill, NUMBER))

    wrong = asyncio.run(examine())
    assert NUMBER - len(wrong) >= LEAST_RIGHT[skill], wrong
