"""A whole sitting with fake servers, its table, JSON and picture."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from benchmarks.compare.figures import Figures
from benchmarks.compare.machine import Machine, Model
from benchmarks.compare.measure import Results, Run, Sitting, Start
from benchmarks.compare.picture import draw
from benchmarks.compare.report import Report, format_table, format_value, make_lines
from benchmarks.compare.servers import Server
from benchmarks.compare.workloads import WORKLOADS

MACHINE = Machine("a CPU", 2, 4.0, "Linux", 10.0, 0.1, None)
MODELS = {"main": Model("m", 2000, 1_000_000_000, 100)}
FIGURES = Figures(50.0, 100.0, 200.0, 200.0, 300.0, 110.0, 5.0, 256)


def make_report(results: Results, servers: list[str]) -> Report:
    workloads = WORKLOADS[:1]
    lines = make_lines(results, servers, workloads, MODELS, 10e9)
    return Report("2026-01-02", "make bench", MACHINE, MODELS, workloads, servers, 3, lines, results)


@pytest.fixture
def report() -> Report:
    """Three runs of workload A with two servers, of which the second failed once; one of them was slow once."""
    results = Results(versions={"Weft": "1", "<Peer>": "2"})
    for run, factor in enumerate([1.0, 9.0, 2.0], start=1):
        results.runs.append(Run("Weft", run, "A", replace(FIGURES, tpot_ms=100 * factor), 0.1))
        results.starts.append(Start("Weft", run, "main", factor))
        results.starts.append(Start("Weft", run, "tiny", 0.5))
    results.runs += [Run("<Peer>", run, "A", replace(FIGURES, tpot_ms=ms), 0.1) for run, ms in [(1, 400.0), (3, 200.0)]]
    return make_report(results, ["Weft", "<Peer>"])


def test_lines_have_medians_ratios_and_floors(report: Report) -> None:
    tpot, ttft, startup = report.lines
    assert tpot.medians == {"Weft": 200, "<Peer>": 300}
    assert tpot.ratio("<Peer>") == pytest.approx(2 / 3)
    assert tpot.ratio("Weft") is None
    assert tpot.floor == pytest.approx((1_000_000_000 + 160 * 100) / 10e6)
    assert ttft.floor is None
    assert startup.medians == {"Weft": 2.0}
    assert startup.ratio("<Peer>") is None


def test_the_first_server_is_the_reference_even_where_it_has_no_figure() -> None:
    """A peer was taken for the reference in lines that the first server had failed in."""
    results = Results(runs=[Run(name, 1, "A", FIGURES, 0.1) for name in ("one", "two")])
    (line, _) = make_lines(results, ["Weft", "one", "two"], WORKLOADS[:1], MODELS, 10e9)
    assert (line.ratio("one"), line.ratio("two")) == (None, None)


def test_the_table_shows_what_is_there(report: Report) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(format_table(report))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    row = next(line for line in text.splitlines() if "time per token" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        *("one stream, time per token", "200 ms", "300 ms 0.67x", "100 ms")
    ]
    row = next(line for line in text.splitlines() if "command to ready" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["command to ready", "2.00 s", "-", ""]


def test_values_have_three_digits() -> None:
    assert [format_value(value, "ms") for value in (1234.5, 12.345, 1.2345)] == ["1,234 ms", "12.3 ms", "1.23 ms"]


def test_the_json_has_every_run(report: Report, tmp_path: Path) -> None:
    report.write_json(tmp_path / "bench.json")
    content = json.loads((tmp_path / "bench.json").read_text())
    assert [run["figures"]["tpot_ms"] for run in content["results"]["runs"]] == [100, 900, 200, 400, 200]
    assert content["lines"][0]["medians"] == {"Weft": 200, "<Peer>": 300}
    assert content["machine"]["memory_read_gb_per_s"] == 10
    assert content["workloads"][0]["input_tokens"] == 128


def test_the_picture_has_bars_in_proportion(report: Report) -> None:
    root = ElementTree.fromstring(draw(report))
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert {"Weft", "<Peer>", "200 ms", "300 ms  (0.67x)", "2.00 s", "$ make bench"} <= set(texts)
    assert "a CPU, 2 cores, 4 GiB, reads 10 GB/s. 2026-01-02, medians of 3 runs." in texts
    bars = [element for element in root.iter(f"{space}rect") if element.get("x") == "250"]
    widths = [(bar.get("class"), int(bar.get("width") or 0)) for bar in bars]
    assert widths == [("s0", 267), ("s1", 400), ("s0", 400), ("s1", 400), ("s0", 400)]
    height = float(root.get("height") or 0)
    assert all(float(element.get("y") or 0) < height for element in root.iter(f"{space}text"))


def test_a_sitting_goes_on_after_a_server_that_fails(fake: Callable[..., Server], tmp_path: Path) -> None:
    workloads = [replace(workload, num_requests=3) for workload in WORKLOADS if workload.key in "AD"]
    console = Console(file=io.StringIO())
    sitting = Sitting(console, workloads, {"main": 2000, "tiny": 2000}, tmp_path, timeout_s=300, rest_s=0)
    for server in (fake("--die", name="Dead"), fake(name="Good")):
        sitting.measure(server, 1)
    results = sitting.results
    assert [(run.server, run.run, run.workload) for run in results.runs] == [("Good", 1, "A"), ("Good", 1, "D")]
    assert [run.figures.num_output_tokens for run in results.runs] == [3 * 64, 3 * 128]
    assert [(start.server, start.model) for start in results.starts] == [("Good", "main"), ("Good", "tiny")]
    assert results.versions == {"Good": "1.2.3"}
    assert [fault.splitlines()[0] for fault in results.faults] == [
        *("Dead, run 1, A: Dead ended with exit code 1", "Dead, run 1, D: Dead ended with exit code 1")
    ]
    assert "the weights are gone" in console.file.getvalue()  # type: ignore[attr-defined]
