"""Weft on a GPU beside what the GPU could do: python -m benchmarks.gpu

Prints how near the engine comes to its limits, with ceilings measured in the same run, and where the time of a decode
step goes; writes the same and more as JSON. Needs no network: models have real shapes and random weights. What cannot
be measured says why, and the rest goes on. Every group of rows has a process and a time box of its own, and all of them
together end within --minutes.

On a bare machine with torch for CUDA, Triton and transformers, Weft's other dependencies must be importable as well:
`pip install -e '.[test]'`, or without a network wheels of what is missing, unpacked into a folder on PYTHONPATH. Tests
and benchmark in one go, within nine minutes: `make gpu GPU_PYTHON=python3`. The benchmark alone:
`python3 -m benchmarks.gpu --out gpu.json`; a part of it: `--rows decode-1,prefill`. Whether it works at all, without a
GPU: `--device cpu --quick`.
"""

import argparse
import datetime
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import sources
from benchmarks.gpu import report
from benchmarks.gpu.job import Findings, Job
from benchmarks.gpu.rows import FULL, QUICK, Row, Sizes, judge, make_rows
from weft.server.supervise.spawn import python_command

TIME_BOXES_S = {
    "ceilings": 60.0,
    "engine": 200.0,
    "http": 100.0,
    "peer": 110.0,
    "vllm": 260.0,
    "ready": 110.0,
    "attention": 40.0,
    "deterministic": 60.0,
    "small": 60.0,
}
"""Group -> most seconds that it may take, less when the whole run is nearly over; those that matter most first."""

LEAST_S = 10.0
"""A group is not begun with less time than this."""

STOP_S = 30.0
"""A worker whose time is over may take so long to end its server."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    keys = [row.key for row in make_rows(FULL)]
    parser.add_argument("--rows", help=f"which ones, comma-separated (default: all of {', '.join(keys)})")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps: whether it works at all")
    parser.add_argument("--minutes", type=float, default=8.5, help="of the whole run (default: 8.5)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/gpu.json"), help="file for the results")
    parser.add_argument(
        "--scratch", type=pathlib.Path, help="folder that keeps models and logs (default: a temporary one)"
    )
    parsed = parser.parse_args(arguments)
    parsed.rows = keys if parsed.rows is None else parsed.rows.split(",")
    if unknown := [key for key in parsed.rows if key not in keys]:
        parser.error(f"no row {', '.join(unknown)}: there are {', '.join(keys)}")
    if parsed.minutes <= 0:
        parser.error(f"--minutes must be more than 0, got {parsed.minutes:g}")
    return parsed


class Sitting:
    """Runs the workers one after the other, and collects what they find."""

    def __init__(self, console: Console, sizes: Sizes, device: str, scratch: pathlib.Path, end_time: float) -> None:
        """Run nothing yet; end_time is on the clock of `time.monotonic`."""
        self.findings = Findings()
        self.seconds: dict[str, float] = {}
        self._console = console
        self._sizes = sizes
        self._device = device
        self._scratch = scratch
        self._end_time = end_time

    def measure(self, group: str, rows: Sequence[Row], progress: Progress) -> None:
        """Measure the rows of one group, within its time box; rows without a figure have a fault afterwards."""
        job = Job(group, tuple(row.key for row in rows), self._sizes, self._device, self._scratch)
        begin = time.monotonic()
        box_s = min(TIME_BOXES_S[group], self._end_time - begin)
        if box_s < LEAST_S:
            self._blame(job, "no time was left for it")
            return
        job.messages.touch()
        fault = self._run(job, box_s, progress)
        self.seconds[group] = time.monotonic() - begin
        if fault is not None:
            self._blame(job, fault)
        for row in rows:
            found, why = self.findings.measurements.get(row.key), self.findings.faults.get(row.key)
            said = report.format_value(found.value, row.unit) if found else f"not measured: {why}"
            self._console.print(f"{row.title}: {said}", highlight=False, markup=False, soft_wrap=True)

    def _run(self, job: Job, box_s: float, progress: Progress) -> str | None:
        """Run a worker; returns why rows may be missing, None when it went well."""
        task = progress.add_task(job.group, total=box_s)
        begin = time.monotonic()
        command = python_command("benchmarks.gpu.worker", str(job.write()))
        with job.log.open("w") as log, job.messages.open() as messages:
            worker = subprocess.Popen(
                command,
                env=sources.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while worker.poll() is None and time.monotonic() - begin < box_s:
                    time.sleep(0.1)
                    self._take(messages)
                    text = f"{job.group}: {self.findings.progress}"
                    progress.update(task, completed=time.monotonic() - begin, description=text)
                is_late = worker.poll() is None
            finally:
                _stop(worker)
            self._take(messages)
        progress.remove_task(task)
        if is_late:
            return f"its time box of {box_s:.0f} s was over while at: {self.findings.progress}"
        if worker.returncode:
            lines = job.log.read_text(errors="replace").splitlines()[-20:]
            self.findings.notes[f"log of {job.group}"] = lines
            self._console.print(*lines, sep="\n", style="dim", highlight=False, markup=False, soft_wrap=True)
            return f"its process ended with exit code {worker.returncode}"
        return None

    def _take(self, messages: TextIO) -> None:
        """Read the messages that are whole; a worker may be writing one."""
        while True:
            begin = messages.tell()
            line = messages.readline()
            if not line.endswith("\n"):
                messages.seek(begin)
                return
            self.findings.take(line)

    def _blame(self, job: Job, why: str) -> None:
        for row in job.rows:
            if row not in self.findings.measurements:
                self.findings.faults.setdefault(row, why)


def _stop(worker: subprocess.Popen[bytes]) -> None:
    """End a worker, which ends its server, and whatever is left of its group."""
    if worker.poll() is None:
        worker.terminate()
        try:
            worker.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def run(options: argparse.Namespace, console: Console, scratch: pathlib.Path) -> bool:
    """Measure, print and write; returns whether every row that was asked for has a figure."""
    sizes = QUICK if options.quick else FULL
    end_time = time.monotonic() + 60 * options.minutes
    rows = tuple(row for row in make_rows(sizes) if row.key in options.rows)
    sitting = Sitting(console, sizes, options.device, scratch, end_time)
    groups = [group for group in TIME_BOXES_S if group == "ceilings" or any(row.group == group for row in rows)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        overall = progress.add_task("groups", total=len(groups))
        for group in groups:
            sitting.measure(group, [row for row in rows if row.group == group], progress)
            progress.advance(overall)
    findings = sitting.findings
    lines = judge(rows, findings.measurements, report.best_ceilings(findings.notes), findings.faults)
    report.show(console, lines, findings.notes)
    command = "python -m benchmarks.gpu " + shlex.join(sys.argv[1:])
    date = datetime.date.today().isoformat()
    report.write(options.out, lines, findings.notes, date=date, command=command, seconds=sitting.seconds)
    console.print(f"written: {options.out}")
    return all(line.measurement for line in lines)


def main() -> None:
    """Run the command; the exit code is 1 when a row has no figure."""
    options, console = parse(sys.argv[1:]), Console()
    if not console.is_terminal:
        console = Console(width=160)  # a log has no width; the table is to stay on its lines
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)  # so that workers end with it, as they do on Ctrl-C
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as temporary:
        scratch = (options.scratch or pathlib.Path(temporary)).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            is_complete = run(options, console, scratch)
        except KeyboardInterrupt:
            sys.exit("interrupted")
    sys.exit(0 if is_complete else 1)


if __name__ == "__main__":
    main()
