"""Decode steps of every kind of model beside what memory allows: `make bench BENCH=architectures`.

Streams of random prompts decode in the real engine, with random weights of shapes scaled down from real ones. Beside
the time of a step stands the time in which what it touches could be read: weights, of experts those that have rows,
keys, values and latents in their windows; states are read and written. How fast the machine reads is measured before
and after each figure. Measure on a machine that does nothing else.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import statistics
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.architectures.models import SHAPES, VOCAB_SIZE, Touched, model_folder
from benchmarks.architectures.steps import Bandwidth, Peer, Steps
from benchmarks.compare import machine

SCRATCH = pathlib.Path("build/bench")
NUM_STEPS = 20


@dataclass(frozen=True, slots=True)
class Round:
    """A window of steps, and what the machine read just before and just after."""

    step_ms: float
    plain_gb_per_s: float
    product_gb_per_s: float
    ratio: float
    """To the time of reading what is touched at the better rate."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Medians over rounds."""

    model: str
    streams: int
    context: float
    experts: int
    """That have rows in a step, of all layers together."""
    touched_bytes: int
    step_ms: float
    floor_ms: float
    ratio: float
    matrix_gb_per_s: float
    """At which a matrix is read that is multiplied with as many rows as there are streams."""
    rounds: tuple[Round, ...]
    llama_ms: float | None
    """A step of llama.cpp; None if it was not measured."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.architectures", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="rounds, of which medians are taken (default: 3)")
    parser.add_argument("--models", default=",".join(SHAPES), help=f"comma-separated (default: {','.join(SHAPES)})")
    parser.add_argument("--streams", default="1,16", help="numbers of streams, ascending (default: 1,16)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt (default: 512)")
    parser.add_argument("--llama-python", type=pathlib.Path, help="interpreter with llama-cpp-python and gguf")
    parser.add_argument("--out", type=pathlib.Path, help=f"folder of results that are kept (default: {SCRATCH})")
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.models.split(",")) - SHAPES.keys():
        parser.error(f"no model {', '.join(sorted(unknown))}: there are {', '.join(SHAPES)}")
    machine.refuse_changes(parser, parsed.out)
    return parsed


def measure(options: argparse.Namespace, name: str, bandwidth: Bandwidth, progress: Progress) -> list[Figure]:
    """All figures of one model."""
    numbers = [int(number) for number in options.streams.split(",")]
    task = progress.add_task(f"{name}: load", total=1 + len(numbers) * (1 + options.runs))
    folder = model_folder(SCRATCH / "architectures", name)
    steps, touched = Steps(folder, VOCAB_SIZE, options.context, max(numbers)), Touched.read(folder)
    progress.advance(task)
    peer = (
        Peer(options.llama_python, folder / "config.json", max(numbers), options.context)
        if options.llama_python
        else None
    )
    figures = []
    for number in numbers:
        progress.update(task, description=f"{name}: prompts of {number}", advance=1)
        steps.reach(number)
        progress.update(task, description=f"{name}: steps of {number}")
        begun, experts = steps.num_tokens(), steps.count_experts()
        windows, reads, matrix = [], [bandwidth.measure()], []
        peers = [peer.time(number, 1)] if peer else []
        for _ in range(options.runs):
            windows.append(steps.time(NUM_STEPS))
            reads.append(bandwidth.measure())
            matrix.append(bandwidth.product(number))
            peers += [peer.time(number, NUM_STEPS)] if peer else []
            progress.advance(task)
        context = statistics.mean((*begun, *steps.num_tokens()))
        num_bytes = touched.weight_bytes((experts + steps.count_experts()) // 2)
        num_bytes += number * touched.cache_bytes(round(context))
        rounds = []
        for window, before, after in zip(windows, reads, reads[1:], strict=False):
            plain, product = max(before[0], after[0]), max(before[1], after[1])
            ratio = window / (num_bytes / max(plain, product))
            rounds.append(Round(window * 1e3, plain / 1e9, product / 1e9, ratio))
        middle = sorted(rounds, key=lambda one: one.ratio)[len(rounds) // 2]
        floor_ms = middle.step_ms / middle.ratio
        medians = middle.step_ms, floor_ms, middle.ratio, statistics.median(matrix) / 1e9
        figures.append(
            Figure(
                name,
                number,
                context,
                experts,
                num_bytes,
                *medians,
                tuple(rounds),
                statistics.median(peers[1:]) if peers else None,
            )
        )
    if peer:
        peer.close()
    return figures


def table(figures: list[Figure]) -> Table:
    """For a terminal."""
    result = Table()
    for title in (
        "",
        "streams",
        "touched",
        "reads",
        "step",
        "floor",
        "step / floor",
        "a matrix with as many rows",
        "llama.cpp",
    ):
        result.add_column(title, justify="right" if title else "left")
    for figure in figures:
        rate = figure.touched_bytes / figure.floor_ms / 1e6
        result.add_row(
            *(figure.model, str(figure.streams), f"{figure.touched_bytes / 1e6:.0f} MB", f"{rate:.1f} GB/s"),
            *(f"{figure.step_ms:.2f} ms", f"{figure.floor_ms:.2f} ms", f"{figure.ratio:.2f}"),
            f"{figure.matrix_gb_per_s:.1f} GB/s",
            "" if figure.llama_ms is None else f"{figure.llama_ms:.2f} ms",
        )
    return result


def main() -> None:
    """Run the command."""
    options, console = parse(sys.argv[1:]), Console()
    here, figures = machine.describe(), []
    with Progress(console=console) as progress:
        bandwidth = Bandwidth()
        for name in options.models.split(","):
            figures += measure(options, name, bandwidth, progress)
    console.print(table(figures))
    folder = options.out or SCRATCH
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "architectures.json"
    before = json.loads(file.read_text())["figures"] if file.exists() else []
    done = {
        "date": datetime.date.today().isoformat(),
        "command": machine_command(sys.argv[1:]),
        "machine": dataclasses.asdict(here),
        "figures": [figure for figure in before if figure["model"] not in options.models.split(",")]
        + [dataclasses.asdict(figure) for figure in figures],
    }
    file.write_text(json.dumps(done, indent=1) + "\n")
    console.print(f"written: {file}")


def machine_command(arguments: list[str]) -> str:
    """The command that measures this again."""
    flags = f" ARGS='{' '.join(arguments)}'" if arguments else ""
    return f"make bench BENCH=architectures{flags}"


if __name__ == "__main__":
    main()
