"""From the command to the first answer: `weft serve`, beside Python loading torch. `make bench BENCH=start`.

    python -m benchmarks.start --model model.gguf --out benchmarks/results/start.json

Of each model, in turns: seconds until /ready and until the first token of a first chat, the first token of later chats,
and the CPU time of all processes until /ready. The page cache holds the files, and what an earlier start measured is
kept, as on a machine that serves the model every day: the first round of all is not counted.
"""

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.compare import machine, servers
from benchmarks.compare.workloads import WORKLOADS
from weft.server.supervise.checkpoint import DEMO_MODEL

WAIT_S = 120.0
LATER_CHATS = 5


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds of one start."""

    ready_s: float
    answered_s: float
    """From the command to the first token of the first chat."""
    later_s: float
    """Median of the first tokens of later chats, each from its own request."""
    cpu_s: float


def load_torch() -> float:
    """Seconds that Python takes to load torch: no server that computes by it is faster."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began


def start(model: str, log: pathlib.Path) -> Start:
    """Start a server, ask it, and end it."""
    workload = WORKLOADS[0]
    server = servers.weft({workload.model: pathlib.Path(model)})
    began = time.perf_counter()
    with servers.running(server, [workload], log, WAIT_S) as running:
        assert running.pid is not None and running.startup_s is not None
        used_s = cpu_seconds(running.pid)
        first_token(running.url)
        answered_s = time.perf_counter() - began
        later_s = statistics.median(first_token(running.url) for _ in range(LATER_CHATS))
        return Start(running.startup_s, answered_s, later_s, used_s)


def first_token(url: str) -> float:
    """Seconds from a chat request to the first words of its answer."""
    messages = [{"role": "user", "content": "Tell a story."}]
    asked = json.dumps({"messages": messages, "max_tokens": 8, "stream": True, "ignore_eos": True, "temperature": 0})
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=WAIT_S)
    began = time.perf_counter()
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", asked, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise SystemExit(f"a chat was answered with {reply.status}: {reply.read(300).decode(errors='replace')}")
        for line in reply:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return time.perf_counter() - began
    raise SystemExit("a chat had no answer")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of all that it started, so far."""
    total, pids = 0, [pid]
    for each in pids:
        with contextlib.suppress(OSError):
            total += sum(map(int, pathlib.Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[11:15]))
            pids += map(int, pathlib.Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return total / os.sysconf("SC_CLK_TCK")


def median(starts: list[Start]) -> dict[str, float]:
    """Of each field, the median over starts."""
    names = [field.name for field in dataclasses.fields(Start)]
    return {name: statistics.median(getattr(each, name) for each in starts) for name in names}


def table(torch_s: float, found: dict[str, dict[str, float]]) -> Table:
    shown = Table("", "ready", "first answer", "CPU until ready", "first token of later chats")
    shown.add_row("import torch", f"{torch_s:.2f} s", "", "", "")
    for name, each in found.items():
        seconds = [f"{each[key]:.2f} s" for key in ("ready_s", "answered_s", "cpu_s")]
        shown.add_row(name, *seconds, f"{each['later_s'] * 1000:.1f} ms")
    return shown


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.start", description=__doc__)
    parser.add_argument("--model", action="append", default=[], help="beside the demo; may be repeated")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="a file for the figures; the tree must be of a commit")
    parsed = parser.parse_args(arguments)
    machine.refuse_changes(parser, parsed.out)
    return parsed


def main() -> None:
    options = parse()
    facts = machine.describe()
    models = [str(DEMO_MODEL), *options.model]
    torches, starts = list[float](), {model: list[Start]() for model in models}
    with tempfile.TemporaryDirectory() as folder:
        for number in track(range(options.runs + 1), "rounds"):
            torches.append(load_torch())
            for model in models:
                taken = start(model, pathlib.Path(folder) / "log")
                if number:
                    starts[model].append(taken)
    torch_s = statistics.median(torches[1:])
    found = {pathlib.Path(model).name: median(each) for model, each in starts.items()}
    Console().print(table(torch_s, found))
    if options.out:
        rounds = {pathlib.Path(model).name: [dataclasses.asdict(s) for s in each] for model, each in starts.items()}
        report = {"machine": dataclasses.asdict(facts), "runs": options.runs, "torch_s": torch_s}
        options.out.write_text(json.dumps(report | {"median": found, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
