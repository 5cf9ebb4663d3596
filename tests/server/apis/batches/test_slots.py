"""Places for lines, and who gets the next one."""

import asyncio

from weft.server.apis.batches.line_run import Slots


async def _settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_who_has_fewest_lines_goes_next() -> None:
    async def run() -> list[str]:
        slots, got = Slots(2), []

        async def take(owner: str) -> None:
            await slots.take(owner)
            got.append(owner)

        asked = [asyncio.create_task(take(owner)) for owner in "aaaabcb"]
        await _settled()
        assert got == ["a", "a"]
        for owner in ("a", "b", "c", "a", "a"):
            slots.give_back(owner)
            await _settled()
        await asyncio.gather(*asked)
        return got

    assert asyncio.run(run()) == ["a", "a", "b", "c", "b", "a", "a"]


def test_who_is_cancelled_holds_none() -> None:
    async def run() -> None:
        slots = Slots(1)
        await slots.take("a")
        waiting, other = asyncio.create_task(slots.take("b")), asyncio.create_task(slots.take("c"))
        await _settled()
        slots.give_back("a")  # to b, which is cancelled before it knows
        waiting.cancel()
        await asyncio.wait_for(other, 60)
        slots.give_back("c")
        await asyncio.wait_for(slots.take("d"), 60)

    asyncio.run(run())
