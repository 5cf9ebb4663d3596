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
            queue.give_back()

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
            queue.give_back()
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)

    in_turn(check)


def test_a_turn_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.01)

    async def check(queue: Turns) -> None:
        with pytest.raises(QueueFullError, match="could not be read within"):
            await queue.take("a")
        queue.give_back()
        await queue.take("b")

    in_turn(check)


@pytest.mark.parametrize("comes", [False, True])
def test_who_leaves_has_no_turn(comes: bool) -> None:
    """Also if it comes at the same moment."""

    async def check(queue: Turns) -> None:
        left, stays = (asyncio.create_task(queue.take(tenant)) for tenant in "ab")
        await asyncio.sleep(0)
        if comes:
            queue.give_back()
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert stays.done() == comes
        if not comes:
            queue.give_back()
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
        queue.give_back()
        await asyncio.wait_for(queue.take("a"), 10)  # nobody else took it

    in_turn(check)
