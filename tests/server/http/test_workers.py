import asyncio
import gc
import threading
import weakref

import pytest

from weft.server.errors import QueueFullError
from weft.server.http import limits as workers
from weft.server.http.limits import LIGHT_SIZE, LONG_SIZE, SHORT_SIZE, Workers


def thread() -> str:
    return threading.current_thread().name.split("_")[0]


def test_each_size_has_its_place() -> None:
    async def main() -> list[str]:
        pool = Workers()
        sizes = (SHORT_SIZE - 1, SHORT_SIZE, LONG_SIZE - 1, LONG_SIZE)
        return [await pool.run(size, thread) for size in sizes] + [
            await pool.run_light(size, thread) for size in (LIGHT_SIZE - 1, LIGHT_SIZE, LONG_SIZE)
        ]

    assert asyncio.run(main()) == ["MainThread", "usual", "usual", "long", "MainThread", "usual", "long"]


def test_a_slow_template_holds_up_nobody_else() -> None:
    """Also if those who asked for it have left; its own chats wait in the order in which they came."""

    class Owner:
        pass

    async def main() -> None:
        pool, may_end, slow, other = Workers(), threading.Event(), Owner(), Owner()
        try:
            for size in (1, LONG_SIZE):
                running = [asyncio.create_task(pool.run_template(slow, size, may_end.wait)) for _ in range(9)]
                await asyncio.sleep(0.01)
                for task in running[:5]:
                    task.cancel()
            names = [await pool.run_template(other, size, thread) for size in (1, LONG_SIZE - 1, LONG_SIZE)]
            assert names == ["chats", "chats", "long chats"]
            assert [await pool.run(size, thread) for size in (SHORT_SIZE, LONG_SIZE)] == ["usual", "long"]
            waiting = asyncio.create_task(pool.run_template(slow, 1, thread))
            await asyncio.sleep(0.01)
            assert not waiting.done()
        finally:
            may_end.set()
        assert await waiting == "chats"

    asyncio.run(main())


def test_work_that_is_taken_out_of_the_queue_holds_nothing() -> None:
    """Bodies of disconnected clients stayed in memory until their turn came."""

    class Body:
        pass

    async def main() -> None:
        pool, may_end = Workers(), threading.Event()
        running = [asyncio.create_task(pool.run(LONG_SIZE, may_end.wait)) for _ in range(2)]
        try:
            body = Body()
            left = weakref.ref(body)
            waiting = asyncio.create_task(pool.run(LONG_SIZE, id, body))
            del body
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            del waiting
            await asyncio.sleep(0)  # what the loop runs at the moment holds what was gathered
            gc.collect()
            assert left() is None
        finally:
            may_end.set()
        await asyncio.gather(*running)

    asyncio.run(main())


def test_long_work_waits_in_a_bounded_queue_that_who_leaves_is_taken_out_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of disconnected clients were still encoded, and everybody else waited."""
    monkeypatch.setattr(workers, "MAX_NUM_LONG", 8)

    async def main() -> None:
        pool, may_end, ran = Workers(), threading.Event(), []

        def work(i: int) -> None:
            ran.append(i)
            may_end.wait()

        tasks = [asyncio.create_task(pool.run(LONG_SIZE, work, i)) for i in range(8)]
        try:
            while len(ran) < 2:
                await asyncio.sleep(0.001)
            with pytest.raises(QueueFullError, match="at most 8 "):
                await pool.run(LONG_SIZE, work, 99)
            assert await pool.run(SHORT_SIZE, thread) == "usual"  # not behind long work
            for task in tasks[2:7]:
                task.cancel()
            await asyncio.gather(*tasks[2:7], return_exceptions=True)
        finally:
            may_end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(ran) == [0, 1, 7]
        await pool.run(LONG_SIZE, work, 8)

    asyncio.run(main())


def test_work_without_an_end_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that loops for ever held its client, and the end of the process."""
    monkeypatch.setattr(workers, "WORK_S", 0.1)

    async def main() -> None:
        pool, may_end = Workers(), threading.Event()
        sizes = (SHORT_SIZE, LONG_SIZE)
        try:
            work = [pool.run(size, may_end.wait, 60) for size in sizes for _ in range(9)]
            late = await asyncio.gather(*work, return_exceptions=True)
            assert {str(error) for error in late} == {"the request could not be prepared within 0.1 s"}
        finally:
            may_end.set()
        assert [await pool.run(size, thread) for size in sizes] == ["usual", "long"]

    asyncio.run(main())
