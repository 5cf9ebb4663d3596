"""What a replica tells of itself, and what it does with requests while its engine is away."""

import asyncio
from typing import Any, cast

import httpx
import pytest

from weft.server.ray.engine_owner import EngineOwner
from weft.server.ray.replica import HoldMiddleware, WeftReplica
from weft.server.settings import Settings


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


@pytest.mark.filterwarnings("ignore:coroutine 'WeftReplica.__del__'", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_replica_with_a_real_engine_tells_that_its_model_is_ready() -> None:
    async def run() -> None:
        settings = Settings(served_model_name=("m", "alias"), kv_cache_memory=32 << 20, metrics_prefix="vllm")
        replica = WeftReplica(settings.model_dump(mode="json"))
        transport = httpx.ASGITransport(cast(Any, await replica.__serve_build_asgi_app__()))
        try:
            await replica.check_health()
            stats = await replica.record_routing_stats()
            assert (stats["alive"], stats["models"], stats["loras"]) == (1.0, ["m", "alias"], [])
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                async with asyncio.timeout(60):
                    while {card["state"] for card in (await client.get("/v1/models")).json()["data"]} != {"ready"}:
                        await asyncio.sleep(0.02)
                assert 'vllm:num_requests_running{model_name="m"} 0.0' in (await client.get("/metrics")).text
        finally:
            await replica.__del__()
            await replica._client.disconnect()

    asyncio.run(run())
