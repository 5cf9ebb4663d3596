"""What interactive streams feel while a batch runs: inter-token latencies alone and beside it, in turns.

    python -m benchmarks.batch_beside --url http://127.0.0.1:8000 --streams 4 --lines 1000

Of a server that runs already, which must not be doing anything else. The batch is cancelled after each round.
"""

import argparse
import asyncio
import json
import random
import statistics
import time

import httpx

from benchmarks.long_prompt import describe, latencies, read_stream

POLL_S = 0.1
WARM_UP = 16
"""First chunks of each stream that are not counted: they hold the other streams' prompts."""


class Bench:
    """A server and what it is asked."""

    def __init__(self, client: httpx.AsyncClient, arguments: argparse.Namespace, model: str) -> None:
        self._client = client
        self._options = arguments
        self._common = {"model": model, "temperature": 0, "ignore_eos": True}
        self._random = random.Random(arguments.seed)

    def _body(self, num_prompt_tokens: int, num_output_tokens: int) -> dict[str, object]:
        prompt = [self._random.randrange(100, 1000) for _ in range(num_prompt_tokens)]
        return self._common | {"prompt": prompt, "max_tokens": num_output_tokens}

    async def gaps(self) -> list[float]:
        """Sorted milliseconds between tokens of streams that run at the same time."""
        times: list[list[float]] = [[] for _ in range(self._options.streams)]
        bodies = [self._body(32, self._options.output_tokens) for _ in times]
        await asyncio.gather(*(read_stream(self._client, *pair) for pair in zip(bodies, times, strict=True)))
        start = max(stream[min(WARM_UP, len(stream) // 2)] for stream in times)  # a chunk may hold several tokens
        end = max(stream[-1] for stream in times)
        return latencies(times, start, end)

    async def begin_batch(self) -> str:
        """Begin a batch, and return its id once lines are done."""
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": self._body(64, 64)}
            for i in range(self._options.lines)
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        files = {"file": ("in.jsonl", content), "purpose": (None, "batch")}
        file = (await self._client.post("/v1/files", files=files)).raise_for_status().json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await self._client.post("/v1/batches", json=asked)).raise_for_status().json()
        while (await self.read(batch["id"]))["request_counts"]["completed"] == 0:
            await asyncio.sleep(POLL_S)
        return str(batch["id"])

    async def read(self, batch_id: str) -> dict[str, dict[str, int]]:
        """The batch as it is."""
        read: dict[str, dict[str, int]] = (await self._client.get(f"/v1/batches/{batch_id}")).raise_for_status().json()
        return read

    async def end_batch(self, batch_id: str) -> int:
        """Cancel a batch, wait for its end, and return how many lines it answered."""
        await self._client.post(f"/v1/batches/{batch_id}/cancel")
        while (batch := await self.read(batch_id))["status"] not in ("cancelled", "completed"):
            await asyncio.sleep(POLL_S)
        return batch["request_counts"]["completed"]


async def measure(arguments: argparse.Namespace) -> None:
    async with httpx.AsyncClient(base_url=arguments.url, timeout=600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        bench, ratios = Bench(client, arguments, model), []
        for number in range(arguments.runs):
            alone = await bench.gaps()
            batch_id = await bench.begin_batch()
            began, done = time.perf_counter(), (await bench.read(batch_id))["request_counts"]["completed"]
            beside = await bench.gaps()
            lasted = time.perf_counter() - began
            meanwhile = (await bench.read(batch_id))["request_counts"]["completed"] - done
            await bench.end_batch(batch_id)
            print(f"round {number + 1}: {meanwhile} lines of the batch were answered beside {lasted:.1f} s of streams")
            print(describe("alone", alone))
            print(describe("beside the batch", beside))
            ratios.append(
                [statistics.quantiles(beside, n=100)[q] / statistics.quantiles(alone, n=100)[q] for q in (49, 98)]
            )
        p50, p99 = (statistics.median(column) for column in zip(*ratios, strict=True))
        print(f"medians of {arguments.runs} rounds, beside the batch / alone: p50 {p50:.2f}, p99 {p99:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
