"""The table, the ceilings and the split of a step, for a terminal; and everything as JSON."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.compare.report import format_value
from benchmarks.gpu.rows import Line, Target
from benchmarks.gpu.time_split import HOST

CEILINGS = {
    "memory_bytes_per_s": ("device memory", 1e9, "GB/s"),
    "matrix_flops_per_s": ("bf16 matrices of the large model", 1e12, "TFLOP/s"),
    "host_to_device_bytes_per_s": ("host to device", 1e9, "GB/s"),
}
"""Note -> what it is, and its unit."""

_SPLIT = "split of "
ENGINE = "engine of "
"""What begins the notes of `in_process`."""


def best_ceilings(notes: Mapping[str, Any]) -> dict[str, float]:
    """Ceiling -> the best that was reached, of those that were measured."""
    return {name: notes[name]["best"] for name in CEILINGS if name in notes}


def describe_target(target: Target | None, unit: str) -> str:
    """Such as ">= 85 %"."""
    if target is None:
        return ""
    parts = []
    if target.least_ratio is not None:
        is_factor = target.least_ratio > 1
        parts.append(f">= {target.least_ratio:g} x" if is_factor else f">= {target.least_ratio:.0%}")
    if target.least is not None:
        parts.append(f">= {target.least:,.0f} {unit}")
    if target.most is not None:
        parts.append(f"<= {target.most:g} {unit}")
    if target.most_idle is not None:
        parts.append(f"idle < {target.most_idle:.0%}")
    return ", ".join(parts)


def rows_table(lines: Sequence[Line]) -> Table:
    """What was measured, beside its limit and its target."""
    table = Table(title="targets")
    table.add_column("what")
    for name in ("limit or other row", "measured", "ratio", "target", "met"):
        table.add_column(name, justify="right")
    for line in lines:
        row, found = line.row, line.measurement
        limit = format_value(line.limit, row.unit) if line.limit is not None else "-"
        target = describe_target(row.target, row.unit)
        if found is None:
            table.add_row(escape(row.title), limit, "-", "-", target, "")
            continue
        ratio = "-" if line.ratio is None else f"{line.ratio:.2f}"
        value = format_value(found.value, row.unit)
        if "engine_idle_share" in found.details:
            value += f", idle {found.details['engine_idle_share']:.0%}"
        met = {None: "", True: "[green]yes", False: "[red]no"}[line.is_met]
        table.add_row(escape(row.title), limit, value, ratio, target, met)
    return table


def ceilings_table(notes: Mapping[str, Any]) -> Table:
    """What the machine reached, each way it was asked."""
    table = Table("ceiling", "by", title="this machine")
    table.add_column("reached", justify="right")
    for note, (name, scale, unit) in CEILINGS.items():
        for way, value in notes.get(note, {}).items():
            table.add_row(name, escape(way), format_value(value / scale, unit))
    return table


def split_table(notes: Mapping[str, Any]) -> Table | None:
    """Milliseconds of a step by part, one column for each row that was profiled; None when none was."""
    splits = {name.removeprefix(_SPLIT): note for name, note in notes.items() if name.startswith(_SPLIT)}
    if not splits:
        return None
    table = Table("part of a step", title="where the time of a decode step goes, in ms")
    for row in splits:
        table.add_column(row, justify="right")
    for part in next(iter(splits.values()))["parts_ms"]:
        style = "bold" if part == HOST else None
        table.add_row(part, *(f"{split['parts_ms'][part]:.3f}" for split in splits.values()), style=style)
    table.add_row("a step", *(f"{split['step_ms']:.3f}" for split in splits.values()))
    return table


def show(console: Console, lines: Sequence[Line], notes: Mapping[str, Any]) -> None:
    """Print it all; the targets last, so that they are what is seen."""
    console.print(", ".join(f"{name} {value}" for name, value in notes.get("machine", {}).items()), highlight=False)
    for note, found in notes.items():
        if note.startswith(ENGINE):
            console.print(f"{note}: attention {found['attention']}", highlight=False)
    for table in (ceilings_table(notes), split_table(notes), rows_table(lines)):
        if table is not None:
            console.print(table)
    for line in lines:
        if line.fault is not None:
            console.print(f"not measured: {line.row.title}: {line.fault}", style="yellow", markup=False)


def write(path: pathlib.Path, lines: Sequence[Line], notes: Mapping[str, Any], **more: Any) -> None:
    """Write everything that is known."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {**more, "rows": [dataclasses.asdict(line) for line in lines], "notes": dict(notes)}
    path.write_text(json.dumps(values, indent=1) + "\n")
