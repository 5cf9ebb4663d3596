"""Weft beside llama.cpp's server on real GGUF files, over HTTP: `make bench BENCH=real`.

    python -m benchmarks.real --runs 3 --out benchmarks/results/real.json

`make real` fetches the files, and others can be made of them (other_form.py). llama.cpp's server is the one on the
path, or that of $LLAMA_SERVER; without it Weft is measured alone. Each round starts every server afresh, one after the
other. Prompts are random ids, outputs greedy. A step of one stream reads all weights, since all models use their
embedding as output head: so the size of the file, a few percent of which are its tokenizer, divided by the time of a
token is a share of what memory gives. That is the better of a plain read and a product.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.table import Table

from benchmarks.architectures.steps import Bandwidth
from benchmarks.compare import machine, servers
from benchmarks.compare.load import LoadError, load
from benchmarks.compare.measure import Sitting
from benchmarks.compare.report import format_value
from benchmarks.compare.servers import Server, ServerError
from benchmarks.compare.workloads import Workload, bodies
from benchmarks.other_form import MADE, gguf_file
from benchmarks.real_quality import NAMES

VOCAB_SIZE = 49_152
"""The smaller one: prompts are the same for all models."""

TIMEOUT_S = 900.0
NUM_STREAMS, NUM_PROMPTS = 4, 16
BURST_AFTER_S = 1.5
WORKLOADS = (  # and the figure of each, with its unit
    (Workload("0", "one stream, time per token", "", 1, 4, 128, 64), "tpot_ms", "ms"),
    (Workload("1", "16 streams", "", 16, 32, 128, 64), "output_tokens_per_s", "tok/s"),
    (Workload("2", "64 streams", "", 64, 64, 64, 64), "output_tokens_per_s", "tok/s"),
    (Workload("3", "first token of 1,024", "", 1, 4, 1024, 8), "ttft_ms", "ms"),
    (Workload("4", "first token of 7,600, all but 16 known", "", 1, 4, 16, 8, prefix_tokens=7584), "ttft_ms", "ms"),
)
STARTUP, BURST, SHARE = (
    "command to ready",
    "longest gap, 16 prompts beside 4 streams",
    "one stream, share of memory's rate",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one model, of every round.

    Attributes:
        values: By server.
    """

    model: str
    title: str
    unit: str
    values: dict[str, list[float]]


def files(parser: argparse.ArgumentParser, names: str) -> dict[str, pathlib.Path]:
    """The GGUF files of models, comma-separated; ends the command if one is not there and cannot be made."""
    for name in names.split(","):
        source, _ = MADE.get(name, (name, None))
        if source not in NAMES or not gguf_file(source).exists():
            parser.error(
                f"{name} is not there: `make real` fetches {', '.join(NAMES)}; of these are made {', '.join(MADE)}"
            )
    return {name: gguf_file(name) for name in names.split(",")}


def burst_gap(server: Server, model: str, round_number: int) -> float:
    """Longest time in milliseconds that running streams waited for a token while prompts came.

    Raises:
        ServerError: The server did not start.
        LoadError: A request failed, or the streams had ended before the prompts came.
    """
    streams = Workload("S", "streams", model, NUM_STREAMS, NUM_STREAMS, 64, 1_500)
    prompts = Workload("P", "prompts", model, NUM_PROMPTS, NUM_PROMPTS, 256, 8)
    both = dataclasses.replace(streams, concurrency=NUM_STREAMS + NUM_PROMPTS)
    log = pathlib.Path(tempfile.gettempdir(), "weft-bench-burst.log")
    with servers.running(server, [both], log, TIMEOUT_S) as running, ThreadPoolExecutor(1) as threads:
        name = servers.model_name(running.url)
        asked = [bodies(each, name, VOCAB_SIZE, 0, round_number) for each in (streams, prompts)]
        load(running.url, asked[1].warm_up, 1, TIMEOUT_S)
        old = threads.submit(load, running.url, asked[0].measured, NUM_STREAMS, TIMEOUT_S)
        time.sleep(BURST_AFTER_S)
        new = load(running.url, asked[1].measured, NUM_PROMPTS, TIMEOUT_S)
        begin, end = min(each.sent_at for each in new), max(each.times[0] for each in new)
        pairs = [pair for stream in old.result() for pair in itertools.pairwise(stream.times)]
        gaps = [after - before for before, after in pairs if begin <= after and before <= end]
        if not gaps:
            raise LoadError("the streams had ended before the prompts came")
        return max(gaps) * 1e3


def measure(console: Console, found: Sequence[Server], paths: dict[str, pathlib.Path], runs: int) -> list[Figure]:
    """All figures; what fails is said and left out."""
    names = [server.name for server in found]
    figures = []
    for model in paths:
        workloads = [dataclasses.replace(workload, model=model) for workload, _, _ in WORKLOADS]
        sitting = Sitting(console, workloads, {model: VOCAB_SIZE}, pathlib.Path(tempfile.gettempdir()))
        gaps: dict[str, list[float]] = {name: [] for name in names}
        for number, server in itertools.product(range(1, runs + 1), found):
            sitting.measure(server, number)
            try:
                gaps[server.name].append(burst_gap(server, model, number))
            except (ServerError, LoadError) as error:
                console.print(f"[red]{server.name}, {BURST}: {error}")
        results = sitting.results
        for workload, (_, field, unit) in zip(workloads, WORKLOADS, strict=True):
            of_all = {
                name: [
                    float(getattr(run.figures, field))
                    for run in results.runs
                    if run.server == name and run.workload == workload.key
                ]
                for name in names
            }
            figures.append(Figure(model, workload.title, unit, of_all))
        figures.append(Figure(model, BURST, "ms", gaps))
        starts = {name: [start.startup_s for start in results.starts if start.server == name] for name in names}
        figures.append(Figure(model, STARTUP, "s", starts))
    return figures


def shares(figures: Sequence[Figure], paths: dict[str, pathlib.Path], bytes_per_s: float) -> Iterator[Figure]:
    """How much of memory's rate the steps of one stream come to."""
    for figure in figures:
        if figure.title == WORKLOADS[0][0].title:
            at_best = paths[figure.model].stat().st_size / bytes_per_s * 1e3
            values = {name: [100 * at_best / value for value in each] for name, each in figure.values.items()}
            yield Figure(figure.model, SHARE, "%", values)


def table(figures: Sequence[Figure], names: Sequence[str]) -> Table:
    """Medians, for a terminal."""
    shown = Table("", "", *names)
    for figure in figures:
        medians = [statistics.median(values) if (values := figure.values.get(name)) else None for name in names]
        cells = ["-" if each is None else format_value(each, figure.unit) for each in medians]
        shown.add_row(figure.model, figure.title, *cells)
    return shown


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser("python -m benchmarks.real", description=__doc__)
    parser.add_argument("--runs", type=int, default=1, help="rounds, of which medians are taken (default: 1)")
    parser.add_argument("--models", default=",".join(NAMES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, help="file for results that are kept")
    options, console = parser.parse_args(), Console()
    machine.refuse_changes(parser, options.out)
    paths = files(parser, options.models)
    os.environ.pop("WEFT_REAL", None)  # no setting of the server
    here, bandwidth, rates = machine.describe(), Bandwidth(), list[float]()
    found = [servers.weft(paths)]
    try:
        found.append(servers.llama_cpp("llama.cpp", paths, ("-t", str(here.num_cores))))
    except ServerError as error:
        console.print(f"[yellow]{error}")
    rates += bandwidth.measure()
    figures = measure(console, found, paths, options.runs)
    rates += bandwidth.measure()
    names = [server.name for server in found]
    figures += shares(figures, paths, max(rates))
    console.print(table(figures, names))
    if options.out:
        done = {
            "date": datetime.date.today().isoformat(),
            "command": f"make bench BENCH=real ARGS={shlex.quote(shlex.join(sys.argv[1:]))}",
            "machine": dataclasses.asdict(dataclasses.replace(here, memory_read_gb_per_s=round(max(rates) / 1e9, 1))),
            "rounds": options.runs,
            "servers": names,
            "figures": [dataclasses.asdict(figure) for figure in figures],
        }
        options.out.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
