"""What running streams feel while a long prompt is prefilled: inter-token latencies, before and during.

    python -m benchmarks.long_prompt --url http://127.0.0.1:8000 --streams 4 --prompt-tokens 3000

Works with any OpenAI-compatible server that takes token ids as a prompt and `ignore_eos`.
"""

import argparse
import asyncio
import itertools
import random
import time

import httpx


async def read_stream(client: httpx.AsyncClient, body: dict[str, object], times: list[float]) -> None:
    """Append the arrival time of every chunk."""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())


def latencies(times: list[list[float]], start: float, end: float) -> list[float]:
    """Sorted milliseconds between chunks of a stream, for chunks that arrived between start and end."""
    gaps = [(b - a) * 1e3 for stream in times for a, b in itertools.pairwise(stream) if start <= b <= end]
    return sorted(gaps)


def describe(name: str, gaps: list[float]) -> str:
    p50, p99 = (gaps[min(int(len(gaps) * q), len(gaps) - 1)] for q in (0.5, 0.99))
    return f"{name:<22} {len(gaps):5d} gaps   p50 {p50:6.1f} ms   p99 {p99:6.1f} ms   max {gaps[-1]:6.1f} ms"


async def measure(arguments: argparse.Namespace) -> None:
    generator = random.Random(arguments.seed)
    async with httpx.AsyncClient(base_url=arguments.url, timeout=600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        common = {"model": model, "temperature": 0, "ignore_eos": True}

        def prompt(num_tokens: int) -> list[int]:
            return [generator.randrange(100, 1000) for _ in range(num_tokens)]

        times: list[list[float]] = [[] for _ in range(arguments.streams)]
        bodies = [common | {"prompt": prompt(32), "max_tokens": arguments.output_tokens} for _ in times]
        streams = [asyncio.ensure_future(read_stream(client, *pair)) for pair in zip(bodies, times, strict=True)]
        while any(len(stream) < 16 for stream in times):
            await asyncio.sleep(0.05)
        before = max(stream[4] for stream in times)  # the first gaps hold the other streams' prompts
        sent = time.perf_counter()
        first: list[float] = []
        await read_stream(client, common | {"prompt": prompt(arguments.prompt_tokens), "max_tokens": 2}, first)
        print(describe("before", latencies(times, before, sent)))
        print(describe("during the long prompt", latencies(times, sent, first[0])))
        print(f"first token of the long prompt after {first[0] - sent:.2f} s")
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--output-tokens", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
