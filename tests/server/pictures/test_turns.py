"""Whose picture is read next: requests and keys alternate, waiting is bounded, and nobody keeps a turn by leaving."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from weft.server.errors import EngineUnavailableError, QueueFullError
from weft.server.pictures import turns
from weft.server.pictures.turns import Turns


def order_of(*requests: tuple[str, str, int]) -> str:
    """In what order pictures are read, of requests that come at once: name, key, number of pictures."""

    async def read(queue: Turns, name: str, tenant: str, number: int, read: list[str]) -> None:
        for _ in range(number):
            await queue.take(tenant)
            read.append(name)
            await asyncio.sleep(0)  # meanwhile all others wait
            queue.give_back(tenant, 1)

    async def run() -> list[str]:
        queue, done = Turns(), list[str]()
        await asyncio.gather(*(read(queue, *each, done) for each in requests))
        return done

    return "".join(asyncio.run(run()))


def test_a_request_with_many_pictures_holds_up_nobody() -> None:
    assert order_of(("a", "", 6), ("b", "", 2), ("c", "", 2)) == "abcabcaaaa"


def test_keys_alternate_however_many_requests_each_sends() -> None:
    many = [("a", "k", 2) for _ in range(4)]
    assert order_of(*many, ("b", "l", 3)) == "abababaaaaa"


def test_keys_share_the_time_that_pictures_take() -> None:
    """Who comes late has no more than others by that."""

    async def run() -> list[str]:
        queue, done = Turns(), list[str]()

        async def read(tenant: str, seconds: float) -> None:
            await queue.take(tenant)
            done.append(tenant)
            await asyncio.sleep(0)
            queue.give_back(tenant, seconds)

        await asyncio.gather(*(read("slow", 4) for _ in range(3)), *(read("fast", 1) for _ in range(8)))
        await asyncio.gather(*(read("late", 1) for _ in range(4)), *(read("fast", 1) for _ in range(4)))
        return done

    done = asyncio.run(run())
    assert done[:11] == ["slow", *["fast"] * 4, "slow", *["fast"] * 4, "slow"]
    assert done[11:] == ["late", "fast"] * 4


def test_several_may_have_a_turn_at_once_and_give_it_back_whatever_happens() -> None:
    async def run() -> None:
        queue = Turns(2)
        with pytest.raises(KeyError):
            async with queue.turn("a"), queue.turn("b"):
                third = asyncio.create_task(queue.take("c"))
                await asyncio.sleep(0)
                assert not third.done()
                raise KeyError
        await asyncio.wait_for(third, 10)

    asyncio.run(run())


def in_turn(check: Callable[[Turns], Awaitable[None]]) -> None:
    """Run a check while somebody has the turn."""

    async def run() -> None:
        await (queue := Turns()).take("first")
        await check(queue)

    asyncio.run(run())


def test_one_key_cannot_fill_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_WAITING", 4)

    async def check(queue: Turns) -> None:
        waiting = [asyncio.create_task(queue.take("a")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="at most 4 requests wait"):
            await queue.take("a")
        waiting.append(asyncio.create_task(queue.take("b")))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await queue.take("b")
        for _ in waiting:
            queue.give_back("first", 0)
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)

    in_turn(check)


def test_a_turn_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.01)

    async def check(queue: Turns) -> None:
        with pytest.raises(QueueFullError, match="could not be read within"):
            await queue.take("a")
        queue.give_back("first", 0)
        await queue.take("b")

    in_turn(check)


@pytest.mark.parametrize("comes", [False, True])
def test_who_leaves_has_no_turn(comes: bool) -> None:
    """Also if it comes at the same moment."""

    async def check(queue: Turns) -> None:
        left, stays = (asyncio.create_task(queue.take(tenant)) for tenant in "ab")
        await asyncio.sleep(0)
        if comes:
            queue.give_back("first", 0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert stays.done() == comes
        if not comes:
            queue.give_back("first", 0)
        await asyncio.wait_for(stays, 10)

    in_turn(check)


def test_who_waits_is_told_that_the_engine_has_gone() -> None:
    async def check(queue: Turns) -> None:
        waiting = [asyncio.create_task(queue.take(tenant)) for tenant in "ab"]
        await asyncio.sleep(0)
        queue.end()
        for each in waiting:
            with pytest.raises(EngineUnavailableError):
                await each
        queue.give_back("first", 0)
        await asyncio.wait_for(queue.take("a"), 10)  # nobody else took it

    in_turn(check)
