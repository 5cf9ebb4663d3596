"""The table: which figures it has, their medians and ratios, as text for a terminal and as JSON."""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.compare.machine import Machine, Model
from benchmarks.compare.measure import Results
from benchmarks.compare.workloads import Workload

STARTUP = "startup"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one workload."""

    workload: str
    """A workload's key, or STARTUP."""
    figure: str
    """A field of `Figures`, or `startup_s`."""
    title: str
    unit: str
    is_higher_better: bool = False
    has_floor: bool = False
    """It cannot take less than reading weights, keys and values once."""


ROWS = (
    Row("A", "tpot_ms", "one stream, time per token", "ms", has_floor=True),
    Row("A", "ttft_ms", "one stream, first token", "ms"),
    Row("B", "output_tokens_per_s", "16 at once, output", "tok/s", is_higher_better=True),
    Row("B", "itl_p99_ms", "16 at once, p99 between tokens", "ms"),
    Row("B", "itl_p50_ms", "16 at once, p50 between tokens", "ms", has_floor=True),
    Row("C", "output_tokens_per_s", "shared prefix, output", "tok/s", is_higher_better=True),
    Row("L", "tpot_ms", "long context, time per token", "ms", has_floor=True),
    Row("D", "output_tokens_per_s", "tiny model, 64 at once, output", "tok/s", is_higher_better=True),
    Row(STARTUP, "startup_s", "command to ready", "s"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A row with its figures: by server, the median over runs. A server without the figure is left out."""

    row: Row
    medians: Mapping[str, float]
    floor: float | None
    """What the memory of this machine allows, in the row's unit; None where it says little."""
    reference: str
    """The server that the others are compared with."""

    def ratio(self, server: str) -> float | None:
        """Return the reference's figure divided by this server's; None for itself and where one is missing."""
        if server == self.reference or not {server, self.reference} <= self.medians.keys():
            return None
        return self.medians[self.reference] / self.medians[server]


@dataclass(frozen=True, slots=True)
class Report:
    """All that was measured, and on what. The first server is the one that the others are compared with."""

    date: str
    command: str
    machine: Machine
    models: Mapping[str, Model]
    workloads: Sequence[Workload]
    servers: Sequence[str]
    num_runs: int
    lines: Sequence[Line]
    results: Results

    def caption(self) -> list[str]:
        """Machine, model, lengths and command, in words."""
        machine = self.machine
        where = f"{machine.cpu}, {machine.num_cores} cores, {machine.memory_gib:g} GiB"
        versions = ", ".join(f"{name} {version}" for name, version in self.results.versions.items())
        names = " and ".join(model.name for model in self.models.values())
        runs = "one run" if self.num_runs == 1 else f"medians of {self.num_runs} runs"
        return [
            f"{where}, reads {machine.memory_read_gb_per_s:g} GB/s. {self.date}, {runs}.",
            f"{names}; {versions}." if names else f"{versions}.",
            *(f"{workload.title}: {workload.describe()}." for workload in self.workloads),
            *([f"0.50x: {self.servers[0]}'s figure is half of this one."] if len(self.servers) > 1 else []),
            f"$ {self.command}",
        ]

    def write_json(self, file: pathlib.Path) -> None:
        """Write everything, every run included."""
        file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def make_lines(
    results: Results,
    servers: Sequence[str],
    workloads: Sequence[Workload],
    models: Mapping[str, Model],
    bytes_per_s: float,
) -> list[Line]:
    """Reduce results to the lines of the table, without those that nothing was measured for.

    Args:
        results: Of all runs.
        servers: In the order of the columns; the others are compared with the first.
        workloads: That were run.
        models: Workload.model -> sizes of the checkpoint; one that is unknown has no floor.
        bytes_per_s: That the machine reads.
    """
    by_key = {workload.key: workload for workload in workloads}
    lines = []
    for row in ROWS:
        values: dict[str, list[float]] = {name: [] for name in servers}
        for run in results.runs:
            if run.workload == row.workload:
                values[run.server].append(getattr(run.figures, row.figure))
        for start in results.starts:
            if row.workload == STARTUP and start.model == "main":
                values[start.server].append(start.startup_s)
        medians = {name: statistics.median(of_server) for name, of_server in values.items() if of_server}
        workload = by_key.get(row.workload)
        model = models.get(workload.model) if workload else None
        floor = model.floor_ms(workload, bytes_per_s) if row.has_floor and workload and model else None
        if medians:
            lines.append(Line(row, medians, floor, servers[0]))
    return lines


def format_value(value: float, unit: str) -> str:
    """Three digits, and the unit."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def format_table(report: Report) -> Table:
    """Make the table for a terminal."""
    reference, *others = report.servers
    table = Table()
    table.add_column("")
    table.add_column(reference, justify="right", style="bold")
    for name in others:
        table.add_column(name, justify="right")
    table.add_column("memory floor, as stored", justify="right", style="dim")
    for line in report.lines:
        cells = [cell(line, name) if name in line.medians else "-" for name in report.servers]
        floor = "" if line.floor is None else format_value(line.floor, line.row.unit)
        table.add_row(line.row.title, *cells, floor)
    return table


def cell(line: Line, server: str) -> str:
    """One server's figure, and the ratio to it."""
    text, ratio = format_value(line.medians[server], line.row.unit), line.ratio(server)
    if ratio is None:
        return text
    is_better = ratio > 1 if line.row.is_higher_better else ratio < 1
    return f"{text} [{'green' if is_better else 'red'}]{ratio:.2f}x[/]"
