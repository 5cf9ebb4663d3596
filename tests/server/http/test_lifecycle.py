import asyncio

import pytest

from weft.server.http.limits import Lifecycle


def test_idle_until_a_request_enters_and_again_when_the_last_leaves() -> None:
    async def main() -> None:
        lifecycle = Lifecycle()
        assert await lifecycle.wait_idle(0.01)
        lifecycle.enter()
        lifecycle.enter()
        lifecycle.leave()
        assert lifecycle.num_active == 1
        assert not await lifecycle.wait_idle(0.01)
        waiting = asyncio.create_task(lifecycle.wait_idle(60))
        await asyncio.sleep(0)
        lifecycle.leave()
        assert await waiting
        assert lifecycle.num_active == 0

    asyncio.run(main())


def test_leave_without_enter_is_a_bug() -> None:
    async def main() -> None:
        with pytest.raises(AssertionError, match="leave without enter"):
            Lifecycle().leave()

    asyncio.run(main())
