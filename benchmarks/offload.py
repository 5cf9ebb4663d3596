"""The first token of a prompt whose blocks fell out of the cache: loaded, beside computed. `make bench BENCH=offload`.

Starts `weft serve` with `kv_offload_dir` and a KV cache that holds one prompt and little more. In each round a prompt
is computed, another one pushes it out, and it is asked for again. All is greedy, so the ids must be the same. Both
times are of one server and of one round, so that what else the machine does disturbs both alike. By default the page
cache of the system holds the files; with --cold it is told to forget them first, so that the disk itself is read.
"""

import argparse
import dataclasses
import datetime
import http.client
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.compare import checkpoints, machine, servers
from benchmarks.compare.workloads import Workload

SCRATCH = pathlib.Path("build/bench")
START_S = 300.0
TAIL_TOKENS = 16
"""Behind the prefix; a question that is asked about it."""
OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds to the first token, and what came from disk."""

    computed_s: float
    loaded_s: float
    loaded_tokens: int
    same_ids: bool


def ask(url: str, prompt: Sequence[int]) -> tuple[float, list[int]]:
    """Seconds to the first token, and the ids of the answer."""
    target = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=600)
    body = {"prompt": list(prompt), "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    start, first_s, ids = time.perf_counter(), 0.0, list[int]()
    try:
        asked = json.dumps(body | {"stream": True, "return_token_ids": True})
        connection.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise SystemExit(
                f"POST /v1/completions answered {reply.status}: {reply.read(300).decode(errors='replace')}"
            )
        for line in reply:
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - start
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice.get("token_ids") or []
    finally:
        connection.close()
    return first_s, ids


def metric(url: str, name: str) -> float:
    """The value of a counter or gauge without other labels than the model's."""
    _, text = servers.get(url, "/metrics")
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            if sample.name == name:
                return float(sample.value)
    raise SystemExit(f"/metrics has no {name}")


def wait_for_disk(url: str) -> None:
    """Wait until the number of blocks on disk grows no more."""
    before = -1.0
    while (now := metric(url, "weft:kv_offload_disk_blocks")) != before:
        before = now
        time.sleep(1.0)


def drop_pages(folder: pathlib.Path) -> None:
    """Tell the system to forget what it keeps of the files in memory."""
    for path in folder.rglob("*.kv"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measure(url: str, folder: pathlib.Path, options: argparse.Namespace) -> list[Round]:
    """All rounds; one before them, which is not counted, shows the engine what loading takes."""
    generator, rounds = random.Random(0), list[Round]()

    def prompt() -> list[int]:
        return [generator.randrange(1_000, 100_000) for _ in range(options.tokens + TAIL_TOKENS)]

    for _ in track(range(options.runs + 1), "rounds"):
        one, other = prompt(), prompt()
        computed_s, ids = ask(url, one)
        ask(url, other)
        wait_for_disk(url)
        if options.cold:
            drop_pages(folder)
        before = metric(url, "weft:kv_offload_disk_loads_total"), metric(url, "weft:prefix_cache_hits_total")
        loaded_s, same = ask(url, one)
        if metric(url, "weft:kv_offload_disk_loads_total") == before[0]:
            raise SystemExit("nothing came from disk: loading was predicted to be slower than computing")
        hits = int(metric(url, "weft:prefix_cache_hits_total") - before[1])
        rounds.append(Round(computed_s, loaded_s, hits, same == ids))
    return rounds[1:]


def table(rounds: Sequence[Round]) -> Table:
    """For a terminal."""
    result = Table()
    for title in ("round", "computed", "loaded", "ratio", "tokens", "same ids"):
        result.add_column(title, justify="right")
    ratio = statistics.median(one.computed_s / one.loaded_s for one in rounds)
    middle = replace(
        rounds[0],
        computed_s=statistics.median(one.computed_s for one in rounds),
        loaded_s=statistics.median(one.loaded_s for one in rounds),
        loaded_tokens=min(one.loaded_tokens for one in rounds),
        same_ids=all(one.same_ids for one in rounds),
    )
    rows = [(str(i), one, one.computed_s / one.loaded_s) for i, one in enumerate(rounds, 1)]
    for name, one, times in [*rows, ("median", middle, ratio)]:
        seconds = f"{one.computed_s:.2f} s", f"{one.loaded_s:.2f} s"
        result.add_row(name, *seconds, f"{times:.1f}", str(one.loaded_tokens), "yes" if one.same_ids else "NO")
    return result


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.offload", description=__doc__)
    parser.add_argument(
        "--shape", choices=list(checkpoints.SHAPES), default="main", help="of the model (default: main)"
    )
    parser.add_argument("--tokens", type=int, default=2000, help="of the prefix (default: 2000)")
    parser.add_argument("--runs", type=int, default=5, help="rounds, of which medians are taken (default: 5)")
    parser.add_argument("--cold", action="store_true", help="read from the disk itself")
    parser.add_argument("--out", type=pathlib.Path, default=SCRATCH, help=f"folder of the results (default: {SCRATCH})")
    parser.add_argument("--cache", default="300MiB", help="kv_cache_memory: room for one prompt (default: 300MiB)")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the command."""
    options, console, here = parse(sys.argv[1:]), Console(), machine.describe()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    flags = ("--device", "cpu", "--dtype", "bfloat16", "--kv-cache-memory", options.cache, "--max-num-seqs", "2")
    group = [Workload("O", "offload", options.shape, 1, 1, options.tokens, OUTPUT_TOKENS)]
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        server = servers.weft({options.shape: checkpoints.checkpoint(options.shape)}, flags=flags)
        server = replace(server, environment={"WEFT_KV_OFFLOAD_DIR": str(pathlib.Path(folder).absolute())})
        with servers.running(server, group, SCRATCH / "offload.log", START_S) as running:
            rounds = measure(running.url, pathlib.Path(folder), options)
    console.print(table(rounds))
    done = {
        "date": datetime.date.today().isoformat(),
        "command": f"make bench BENCH=offload ARGS='{' '.join(sys.argv[1:])}'",
        "machine": dataclasses.asdict(here),
        "rounds": [dataclasses.asdict(one) for one in rounds],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "offload.json"
    file.write_text(json.dumps(done, indent=1) + "\n")
    console.print(f"written: {file}")


if __name__ == "__main__":
    main()
