"""One sitting: every server in turn, each run with fresh processes, so that no cache flatters the next one.

What fails is said and left out; the rest goes on.
"""

import contextlib
import pathlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.compare import servers
from benchmarks.compare.figures import Figures, figures
from benchmarks.compare.load import LoadError, load
from benchmarks.compare.servers import Running, Server, ServerError
from benchmarks.compare.workloads import Workload, bodies


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server."""

    server: str
    run: int
    model: str
    startup_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload."""

    server: str
    run: int
    workload: str
    figures: Figures
    client_cpu_s: float
    """What the load generator took of the cores that it shares with the server."""


@dataclass(slots=True)
class Results:
    """What a sitting has come to so far; `Sitting` alone adds to it."""

    starts: list[Start] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    """By server; one that says no version is not in it."""
    faults: list[str] = field(default_factory=list)

    def forget(self, number: int) -> None:
        """Drop a round that was not completed."""
        self.starts = [start for start in self.starts if start.run != number]
        self.runs = [run for run in self.runs if run.run != number]
        self.faults.append(f"interrupted in round {number}")


class Sitting:
    """Measures servers and shows how far it is."""

    def __init__(
        self,
        console: Console,
        workloads: Sequence[Workload],
        vocab_sizes: dict[str, int],
        logs: pathlib.Path,
        seed: int = 0,
        timeout_s: float = 900.0,
        rest_s: float = 3.0,
    ) -> None:
        """Measure nothing yet.

        Args:
            console: Where progress is shown.
            workloads: What to measure.
            vocab_sizes: Workload.model -> prompts are ids below this.
            logs: Folder for the servers' output.
            seed: Of the prompts.
            timeout_s: Most seconds for one start, and for one request.
            rest_s: Before each workload every server is left alone so long, as it is while a client starts.
        """
        self.results = Results()
        self._console = console
        self._workloads = workloads
        self._vocab_sizes = vocab_sizes
        self._logs = logs
        self._seed = seed
        self._timeout_s = timeout_s
        self._rest_s = rest_s

    def measure(self, server: Server, run: int) -> None:
        """Start a server as often as its workloads need it, and run them."""
        for group in server.groups(self._workloads):
            keys = "".join(workload.key for workload in group)
            log = self._logs / f"{server.name.replace(' ', '-')}-{keys}-{run}.log"
            try:
                with self._started(server, group, log) as started:
                    if started.startup_s is not None:
                        self.results.starts.append(Start(server.name, run, group[0].model, started.startup_s))
                    self._run_group(server.name, started, group, run)
            except (ServerError, LoadError) as error:
                fault = "\n".join([f"{server.name}, run {run}, {keys}: {error}", *getattr(error, "__notes__", [])])
                self.results.faults.append(fault)
                self._console.print(f"[red]{escape(fault)}")

    def measure_url(self, name: str, url: str, run: int) -> None:
        """Run the workloads on a server that is there already.

        Raises:
            ServerError: It does not say which model it has.
            LoadError: A request failed.
        """
        self._run_group(name, Running(url, None), self._workloads, run)

    @contextlib.contextmanager
    def _started(self, server: Server, group: Sequence[Workload], log: pathlib.Path) -> Iterator[Running]:
        with contextlib.ExitStack() as stack:
            with self._console.status(f"{server.name} starts"):
                started = stack.enter_context(servers.running(server, group, log, self._timeout_s))
            self._console.print(f"{server.name}: ready after {started.startup_s:.1f} s")
            yield started

    def _run_group(self, name: str, server: Running, group: Sequence[Workload], run: int) -> None:
        model = servers.model_name(server.url)
        if (version := servers.version(server.url)) is not None:
            self.results.versions[name] = version
        for workload in group:
            time.sleep(self._rest_s)
            before = time.process_time()
            result = self._run(name, server.url, model, workload, run)
            cpu_s = time.process_time() - before
            self.results.runs.append(Run(name, run, workload.key, result, cpu_s))
            self._console.print(
                f"{name}, run {run}, {workload.key} ({workload.title}): {result.output_tokens_per_s:.1f} tok/s, first "
                f"token {result.ttft_ms:.0f} ms, per token {result.tpot_ms:.1f} ms, between tokens p50 "
                f"{result.itl_p50_ms:.1f} p99 {result.itl_p99_ms:.1f} ms",
                highlight=False,
                soft_wrap=True,
            )

    def _run(self, name: str, url: str, model: str, workload: Workload, run: int) -> Figures:
        requests = bodies(workload, model, self._vocab_sizes[workload.model], self._seed, run)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Once a second: the display shares the cores with the server.
        hidden = not self._console.is_terminal
        with Progress(
            *columns, console=self._console, transient=True, refresh_per_second=1, disable=hidden
        ) as progress:
            task = progress.add_task(f"{name}, {workload.title}: {workload.describe()}", total=len(requests.measured))
            load(url, requests.warm_up, 1, self._timeout_s)
            streams = load(
                url, requests.measured, workload.concurrency, self._timeout_s, lambda: progress.advance(task)
            )
        return figures(streams, workload.output_tokens)
