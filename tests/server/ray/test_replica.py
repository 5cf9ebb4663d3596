"""What a replica does with requests while its engine is away."""

import asyncio
from typing import Any, cast

from weft.server.ray.engine_owner import EngineOwner
from weft.server.ray.replica import HoldMiddleware


class FakeOwner(EngineOwner):
    """Its engine is away until it is set."""

    patience_s = 1e6

    def __init__(self) -> None:
        self.alive = asyncio.Event()

    @property
    def is_alive(self) -> bool:
        return self.alive.is_set()


def test_requests_wait_for_an_engine_that_is_away() -> None:
    async def run() -> None:
        served: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            served.append(scope["path"])

        owner = FakeOwner()
        hold = HoldMiddleware(app, owner)

        async def ask(path: str, kind: str = "http") -> None:
            await hold({"type": kind, "path": path}, cast(Any, None), cast(Any, None))

        await ask("/health")  # probes are answered at once, and so is what is no request
        await ask("lifespan", "lifespan")
        waiting = [asyncio.create_task(ask(path)) for path in ("/v1/chat/completions", "/v1/models")]
        await asyncio.sleep(0.1)
        assert served == ["/health", "lifespan"]
        owner.alive.set()
        await asyncio.gather(*waiting)
        assert sorted(served[2:]) == ["/v1/chat/completions", "/v1/models"]

        owner.alive.clear()
        owner.patience_s = 0.0
        await ask("/late")  # the app refuses it
        assert served[-1] == "/late"

    asyncio.run(run())
