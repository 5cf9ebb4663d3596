"""Many clients at once: everybody gets what they would get alone, and nothing is left behind."""

import asyncio
import json
import random
from typing import Any

import httpx

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer

Body = dict[str, Any]


async def stream_ids(client: httpx.AsyncClient, body: Body, most: int | None = None) -> list[int]:
    """Token ids of a streamed completion, from which the client leaves once it has seen `most` of them."""
    ids: list[int] = []
    async with client.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}
    ) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice.get("token_ids") or []
                if most is not None and len(ids) >= most:
                    break
    return ids


def client_of(server: LiveServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.base_url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))


def test_parallel_streams_equal_their_solo_runs(live_server: LiveServer) -> None:
    """In float32, greedy and seeded, with prompts that share prefixes and prompts that do not."""
    generator = random.Random(0)
    model = live_server.get("/v1/models").json()["data"][0]["id"]
    bodies: list[Body] = []
    for number in range(32):
        prompt = [7] * (16 * (number % 4)) + [generator.randrange(10, 400) for _ in range(generator.randrange(1, 120))]
        sampling = {"temperature": 0} if number % 2 else {"temperature": 1, "seed": number, "top_p": 0.9, "top_k": 40}
        bodies.append({"model": model, "prompt": prompt, "max_tokens": 24, "ignore_eos": True} | sampling)

    async def run() -> tuple[list[list[int]], list[list[int]]]:
        async with client_of(live_server) as client:
            together = await asyncio.gather(*(stream_ids(client, body) for body in bodies))
            alone = [await stream_ids(client, body | {"cache_salt": "alone"}) for body in bodies]
        return together, alone

    together, alone = asyncio.run(run())
    assert all(len(ids) == 24 for ids in together)
    assert together == alone


def test_a_common_prefix_is_computed_once(live_server: LiveServer) -> None:
    """Eight requests that arrive together, with 1,000 tokens in common that nobody has asked for before."""
    model = live_server.get("/v1/models").json()["data"][0]["id"]
    generator = random.Random(1)
    prefix = [generator.randrange(10, 400) for _ in range(1000)]

    async def run() -> None:
        async with client_of(live_server) as client:
            bodies = [{"model": model, "prompt": [*prefix, 10 + i], "max_tokens": 4} for i in range(8)]
            await asyncio.gather(*(stream_ids(client, body) for body in bodies))

    before = {
        name: live_server.metric(f"weft:{name}") for name in ("prefix_cache_queries_total", "prefix_cache_hits_total")
    }
    asyncio.run(run())
    queries = live_server.metric("weft:prefix_cache_queries_total") - before["prefix_cache_queries_total"]
    hits = live_server.metric("weft:prefix_cache_hits_total") - before["prefix_cache_hits_total"]
    assert queries == 8 * 1001
    assert hits == 7 * (1000 // 32) * 32


def test_clients_that_vanish_leave_no_blocks_behind(live_server: LiveServer) -> None:
    """200 clients, streaming or not, that leave at random moments, some of them after a few tokens."""
    model = live_server.get("/v1/models").json()["data"][0]["id"]
    generator = random.Random(2)

    async def vanish(client: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": model,
            "prompt": [10 + number % 300] * 40,
            "max_tokens": 2000,
            "ignore_eos": True,
            "n": 1 + number % 2,
        }
        if number % 10 == 1:
            await stream_ids(client, body, most=10)
            return
        request = stream_ids(client, body) if number % 2 else client.post("/v1/completions", json=body)
        task = asyncio.ensure_future(request)
        await asyncio.sleep(generator.random() * 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def run() -> None:
        async with client_of(live_server) as client:
            await asyncio.gather(*(vanish(client, number) for number in range(200)))

    before = live_server.metric("weft:generation_tokens_total")
    asyncio.run(run())
    assert live_server.metric("weft:generation_tokens_total") >= before + 200, "nobody was served"
    live_server.wait_for_metric("weft:num_requests_running", 0)
    live_server.wait_for_metric("weft:num_requests_waiting", 0)
    live_server.wait_for_metric("weft:kv_cache_usage_perc", 0)
