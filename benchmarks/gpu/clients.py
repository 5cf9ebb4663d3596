"""Clients of a server, each in a process of its own, so that none of them is what limits it.

Imports no torch: every client would have to wait for it.
"""

import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Self

from benchmarks.compare import servers
from benchmarks.compare.load import Stream, load
from benchmarks.compare.workloads import Workload, bodies

REQUEST_TIMEOUT_S = 60.0
LEAD_S = 0.5
"""After which clients begin, all at the same time."""


class Clients:
    """Sends workloads to one server. To be left after the server, whose end ends what they still wait for."""

    def __init__(self, vocab_size: int, num_clients: int) -> None:
        """Start num_clients processes; prompts are ids below vocab_size."""
        self._url = self._model = ""
        self._vocab_size = vocab_size
        self._num_clients = num_clients
        self._pool = ProcessPoolExecutor(num_clients, multiprocessing.get_context("spawn"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def connect(self, url: str) -> None:
        """Send to the server at url from now on, and ask it what its model is called."""
        self._url, self._model = url, servers.model_name(url)

    def engine_stats(self) -> dict[str, float]:
        """The engine's counters."""
        status, body = servers.get(self._url, "/stats")
        if status != 200:
            raise servers.ServerError(f"{self._url}/stats answered {status}")
        stats: dict[str, float] = json.loads(body)["engine"]
        return stats

    def send(self, workload: Workload, run: int, num_clients: int | None = None) -> tuple[list[Stream], float]:
        """Send a workload from several processes, which begin together.

        Args:
            run: Every run has prompts of its own.
            num_clients: Processes that take part; None means all.

        Returns:
            All streams, and the share of the time that the busiest client was busy.
        """
        number = num_clients or self._num_clients
        requests = bodies(workload, self._model, self._vocab_size, 0, run).measured
        begin_at = max(self._pool.map(_now, range(number))) + LEAD_S
        jobs = []
        for index in range(number):
            at_once = len(range(index, workload.concurrency, number))
            jobs.append(self._pool.submit(_send, self._url, requests[index::number], at_once, begin_at))
        results = [job.result() for job in jobs]
        streams = [stream for part, _, _ in results for stream in part]
        return streams, max(cpu_s / wall_s for _, cpu_s, wall_s in results)


def _now(index: int) -> float:
    """Start a client process; all have one clock."""
    return time.perf_counter()


def _send(url: str, requests: list[bytes], at_once: int, begin_at: float) -> tuple[list[Stream], float, float]:
    """One client: its streams, and the CPU time and the time that they took."""
    time.sleep(max(0.0, begin_at - time.perf_counter()))
    begin, cpu_s = time.perf_counter(), time.process_time()
    streams = load(url, requests, at_once, REQUEST_TIMEOUT_S)
    return streams, time.process_time() - cpu_s, time.perf_counter() - begin
