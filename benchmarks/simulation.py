"""What `weft simulate` predicts, beside what servers do. `make bench BENCH=simulation`.

Two `weft serve`, each on a core of its own, get a made-up trace, each request when it is due; the router's policy sends
it, by the statistics that the servers show. Before each replay steps are measured on one of these cores, and the trace
is simulated. It is simulated once more at the speed that the machine had while it replayed: with all costs times a
factor, so that the steps take as long in all as those of the servers. The second prediction tells of scheduler, cache
and router what the first one may hide behind other load on the machine. The model has random weights, and a step takes
some ten milliseconds: what a front end adds is little.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import random
import statistics
import sys
import time
from dataclasses import dataclass

import httpx
import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.compare import machine, servers
from benchmarks.compare.workloads import Workload
from benchmarks.offload import metric
from weft.engine.simulate import prompt_ids
from weft.engine.wire.options import Arrive, EngineOptions, Finished, StepCosts
from weft.server.cli.simulate import Outcome, Simulator, TraceLine
from weft.server.ray.policy import PrefixPolicy, ReplicaView
from weft.server.supervise.checkpoint import DEMO_MODEL

SCRATCH = pathlib.Path("build/bench")
START_S = 300.0
HASH_TOKENS = 64
CACHE_BYTES = 400_000_000
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "head_dim": 64}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_window_layers": 10}


@dataclass(frozen=True, slots=True)
class Round:
    """Predicted, before and at the speed that the machine had then, and measured, by name; how loaded it was."""

    predicted: dict[str, float]
    at_speed: dict[str, float]
    speed: float
    """Seconds of the servers' steps, beside those predicted."""
    measured: dict[str, float]
    load_average: float
    median_step_error: float

    def error(self, name: str, *, at_speed: bool = False) -> float:
        """Of a prediction, relative to what was measured."""
        return (self.at_speed if at_speed else self.predicted)[name] / self.measured[name] - 1


def write_model(folder: pathlib.Path) -> pathlib.Path:
    """The demo model's tokenizer, and a configuration for random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in DEMO_MODEL.glob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | SIZES | HEADS
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_trace(number: int, rate: float, seed: int) -> list[TraceLine]:
    """Turns of conversations, which begin alike, at random times."""
    generator, now, ids = random.Random(seed), 0.0, itertools.count()
    conversations = [[next(ids)] for _ in range(8)]
    lines = []
    for _ in range(number):
        now += generator.expovariate(rate)
        blocks = generator.choice(conversations)
        if len(blocks) > 5:
            del blocks[1:]
        blocks.append(next(ids))
        length = len(blocks) * HASH_TOKENS + generator.randrange(8, 40)
        lines.append(TraceLine(now * 1e3, length, generator.randrange(16, 48), list(blocks)))
    return lines


def summary(outcome: Outcome) -> dict[str, float]:
    """What is compared."""
    first = {f"first token p{p} ms": outcome.percentile("first_token_s", p) for p in (50, 90)}
    mean_s = statistics.fmean(outcome.finished.first_token_s)
    return first | {
        "first token mean ms": mean_s * 1e3,
        "next token mean ms": statistics.fmean(outcome.finished.gaps_s) * 1e3,
        "output tokens/s": outcome.output_rate,
        "cached %": outcome.hit_rate * 100,
    }


async def replay(urls: list[str], model: str, trace: list[TraceLine], vocab_size: int) -> Outcome:
    """Send the trace to servers, each request when it is due."""
    policy, first_s, gaps = PrefixPolicy(), list[float](), list[float]()
    views = tuple(ReplicaView(str(i)) for i in range(len(urls)))
    ended = tokens = 0.0

    async def look() -> None:
        nonlocal views
        while True:
            counts = await asyncio.to_thread(
                lambda: [[metric(u, f"weft:num_requests_{what}") for what in ("running", "waiting")] for u in urls]
            )
            views = tuple(ReplicaView(str(i), int(r), int(w)) for i, (r, w) in enumerate(counts))
            await asyncio.sleep(1.0)

    async def ask(number: int, line: TraceLine, client: httpx.AsyncClient, began: float) -> None:
        nonlocal ended, tokens
        now = line.timestamp / 1e3
        await asyncio.sleep(max(0.0, began + now - time.perf_counter()))
        prefix = b"".join(value.to_bytes(8, "little") * (HASH_TOKENS // 2) for value in line.hash_ids)
        chosen = policy.choose(views, prefix, time.perf_counter())
        assert chosen is not None
        arrive = Arrive(0, now, line.input_length, line.output_length, line.hash_ids, HASH_TOKENS)
        body = {"model": model, "prompt": prompt_ids(arrive, number, vocab_size), "max_tokens": line.output_length}
        body |= {"stream": True, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        last, due = 0.0, began + now
        async with client.stream("POST", f"{urls[int(chosen.id)]}/v1/completions", json=body) as answer:
            async for text in answer.aiter_lines():
                if not text.startswith("data: {"):
                    continue
                count = sum(len(choice.get("token_ids") or []) for choice in json.loads(text[6:])["choices"])
                if not count:
                    continue
                at = time.perf_counter()
                if last:
                    gaps.extend([(at - last) / count] * count)
                else:
                    first_s.append(at - due)
                last, tokens = at, tokens + count
        ended = max(ended, last - began)

    before = counted(urls)
    looking = asyncio.create_task(look())
    async with httpx.AsyncClient(timeout=600) as client:
        began = time.perf_counter()
        await asyncio.gather(*(ask(i, line, client, began) for i, line in enumerate(trace)))
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking
    hits, prompts, busy_s = (now - then for now, then in zip(counted(urls), before, strict=True))
    return Outcome(len(urls), Finished(first_s, gaps, int(prompts), int(tokens), int(hits), busy_s, ended, {}), ended)


def counted(urls: list[str]) -> list[float]:
    """Cached and other prompt tokens, and seconds of steps, of all servers since they began."""
    names = ("prefix_cache_hits_total", "prompt_tokens_total", "engine_step_seconds_total")
    return [sum(metric(url, f"weft:{name}") for url in urls) for name in names]


def at_speed(
    costs: pathlib.Path, trace: list[TraceLine], options: EngineOptions, busy_s: float
) -> tuple[Outcome, float]:
    """Simulate with costs at which steps take so long in all: they are scaled until they do. And by how much."""
    factor, known = 1.0, msgspec.json.decode(costs.read_bytes(), type=StepCosts)
    for _ in range(3):
        scaled = msgspec.structs.replace(known, seconds=[factor * value for value in known.seconds])
        costs.write_bytes(msgspec.json.encode(scaled))
        with Simulator(options, costs) as simulator:
            outcome = simulator.replay(trace, 2, HASH_TOKENS)
        used, factor = factor, factor * busy_s / outcome.finished.busy_s
    return outcome, used


def flags(model: pathlib.Path) -> EngineOptions:
    """Of engines and servers alike."""
    return EngineOptions(
        model=str(model), load_format="dummy", dtype="bfloat16", device="cpu", kv_cache_memory=CACHE_BYTES
    )


def measure(options: argparse.Namespace) -> list[Round]:
    """All rounds."""
    model, rounds = write_model((SCRATCH / "simulation").absolute()), []
    cores = sorted(os.sched_getaffinity(0))[:2]
    arguments = ("--load-format", "dummy", "--dtype", "bfloat16", "--device", "cpu", "--kv-cache-memory")
    program = (sys.executable, "-P", "-m", "weft.server", "serve", "{model}", "--port", "{port}", *arguments)
    group = [Workload("S", "simulation", "dummy", 1, 1, 100, 16)]
    with contextlib.ExitStack() as stack:
        urls = []
        for core in cores:
            command = ("taskset", "-c", str(core), *program, str(CACHE_BYTES))
            server = servers.Server("Weft", command, {"dummy": model}, "/ready")
            log = SCRATCH / f"simulation-{core}.log"
            urls.append(stack.enter_context(servers.running(server, group, log, START_S)).url)
        name = servers.model_name(urls[0])
        for number in track(range(options.runs), "rounds"):
            trace = make_trace(options.requests, options.rate, number)
            costs = SCRATCH / "simulation-costs.json"
            costs.unlink(missing_ok=True)
            everywhere = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {cores[-1]})  # the engine that is measured inherits it
            with Simulator(flags(model), costs) as simulator:
                os.sched_setaffinity(0, everywhere)
                predicted = simulator.replay(trace, len(urls), HASH_TOKENS)
                step_error, vocab_size = simulator.costs.median_error, simulator.costs.vocab_size
            measured = asyncio.run(replay(urls, name, trace, vocab_size))
            load = os.getloadavg()[0]
            slowed, speed = at_speed(costs, trace, flags(model), measured.finished.busy_s)
            rounds.append(Round(summary(predicted), summary(slowed), speed, summary(measured), load, step_error))
    return rounds


def table(rounds: list[Round]) -> Table:
    """Predicted, at speed and measured, by round; the last columns are the medians of the sizes of both errors."""
    heads = (f"round {i} (load {one.load_average:.0f}, times {one.speed:.2f})" for i, one in enumerate(rounds, 1))
    made = Table("", *heads, "error", "at speed")
    for name in rounds[0].predicted:
        cells = [f"{one.predicted[name]:,.0f}, {one.at_speed[name]:,.0f} / {one.measured[name]:,.0f}" for one in rounds]
        errors = (statistics.median(abs(one.error(name, at_speed=at)) for one in rounds) for at in (False, True))
        made.add_row(name, *cells, *(f"{error:.0%}" for error in errors))
    return made


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("--requests", type=int, default=60, help="in a trace (default: 60)")
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second (default: 1.5)")
    parser.add_argument("--runs", type=int, default=3, help="rounds, each with a trace of its own (default: 3)")
    parser.add_argument("--out", type=pathlib.Path, default=SCRATCH, help=f"folder of the results (default: {SCRATCH})")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the command."""
    options, console, here = parse(sys.argv[1:]), Console(), machine.describe()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    rounds = measure(options)
    console.print(table(rounds))
    done = {
        "date": datetime.date.today().isoformat(),
        "command": f"make bench BENCH=simulation ARGS='{' '.join(sys.argv[1:])}'",
        "machine": dataclasses.asdict(here),
        "rounds": [dataclasses.asdict(one) for one in rounds],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "simulation.json"
    file.write_text(json.dumps(done, indent=1) + "\n")
    console.print(f"written: {file}")


if __name__ == "__main__":
    main()
