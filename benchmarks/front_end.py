"""What one server process costs per token, and how late it makes tokens, over an engine that computes nothing.

    python -m benchmarks.front_end --streams 256 --rate 100

A real server process, alone on one core, between a fake engine (front_end_engine.py) and clients that count bytes, on
the other cores. Every token's text holds one letter that nothing else in a stream holds, so tokens are counted
whatever way they are cut or joined. Per row: tokens offered and delivered, CPU time of the server process, and the time
from the engine's hand-over of a step to the arrival of its tokens at the client. A rate beyond what the server carries
finds the ceiling: its tokens then arrive several to an event.
"""

import argparse
import contextlib
import json
import os
import pathlib
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.front_end_engine import StepTable
from server.child import Child, python_command, python_environment
from server.settings import Settings
from server.supervisor import METRICS_NAME, listen, ready_file, runtime_directory, write_options
from server.tokenizer import Tokenizer

CHECKPOINT = pathlib.Path(__file__).parents[1] / "server" / "demo_model"
TOKEN_TEXT, TOKEN_MARK, EVENT_MARK = " Zoe", b"Z", b"]"
"""The mark of a token is in no header, id or key; that of an event is there once, as the end of its choices."""
LOOK_S = 0.001
"""Clients look this often instead of waiting, so that no write of the server has to wake them: on a virtual machine
that costs more than the write, and clients elsewhere would not be woken by it. Adds up to as much to each latency."""
END = b"0\r\n\r\n"
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Who is the best of them all?"}]},
    "/v1/completions": {"prompt": "The best of them all is"},
}


@dataclass(slots=True)
class Stream:
    """One connection; it asks anew whenever its answer ends."""

    sock: socket.socket
    seed: int
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row. Latencies in seconds, sorted; CPU time in seconds."""

    path: str
    window_s: float
    num_offered: int
    num_tokens: int
    num_events: int
    num_bytes: int
    server_cpu_s: float
    load_cpu_s: float
    latencies: np.ndarray

    def quantile_ms(self, q: float) -> float:
        """Added latency in milliseconds."""
        return float(np.quantile(self.latencies, q)) * 1e3


class Clients:
    """All streams in one loop; they count, and take note of when what arrived."""

    def __init__(self, port: int, path: str, num_streams: int, num_output_tokens: int) -> None:
        """Connect, and ask on every connection."""
        self._path = path
        self._num_output_tokens = num_output_tokens
        self._num_asked = 0
        self._epoll = select.epoll()
        self._streams: dict[int, Stream] = {}
        self.arrivals: list[tuple[int, int, int, float]] = []  # (seed, tokens before, tokens, time)
        self.num_events = self.num_bytes = 0
        for _ in range(num_streams):
            sock = socket.create_connection(("127.0.0.1", port))
            stream = self._streams[sock.fileno()] = Stream(sock, 0)
            self._epoll.register(sock, select.EPOLLIN)
            self._ask(stream)

    @property
    def all_flow(self) -> bool:
        """Whether every stream has got a token."""
        return all(stream.num_tokens for stream in self._streams.values())

    def read_until(self, end_time: float) -> None:
        """Read whatever comes, until end_time on the clock of `time.monotonic`."""
        while time.monotonic() < end_time:
            for number, _ in self._epoll.poll(0):
                self._read(self._streams[number])
            time.sleep(LOOK_S)

    def close(self) -> None:
        """Leave, in the middle of every stream."""
        for stream in self._streams.values():
            stream.sock.close()
        self._epoll.close()

    def _ask(self, stream: Stream) -> None:
        stream.seed, stream.num_tokens = self._num_asked, 0
        self._num_asked += 1
        options = {"stream": True, "seed": stream.seed, "max_tokens": self._num_output_tokens, "ignore_eos": True}
        body = json.dumps(BODIES[self._path] | options)
        head = f"POST {self._path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        stream.sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())

    def _read(self, stream: Stream) -> None:
        data = stream.sock.recv(1 << 18)
        now = time.monotonic()
        if not data or data.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")):
            raise SystemExit(f"the server ended a stream: {data!r}")
        num_tokens = data.count(TOKEN_MARK)
        self.arrivals.append((stream.seed, stream.num_tokens, num_tokens, now))
        self.num_events += data.count(EVENT_MARK)
        self.num_bytes += len(data)
        stream.num_tokens += num_tokens
        if stream.num_tokens == self._num_output_tokens and data.endswith(END):
            self._ask(stream)


def cpu_s(pid: int) -> float:
    """CPU time that a process has used, with all its threads."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def front_end(steps_per_s: float, port: int) -> Iterator[tuple[int, int, int, StepTable]]:
    """A server process and a fake engine; yields port, pids of server and engine, and the table of steps."""
    cores = sorted(os.sched_getaffinity(0))
    others = cores[:-1] or cores
    model = CHECKPOINT
    settings = Settings(served_model_name=("m",), max_num_waiting=1 << 16)
    (token_id,) = Tokenizer.load(model).encode(TOKEN_TEXT, False)
    with runtime_directory() as runtime_dir, listen("127.0.0.1", port) as listener:
        write_options(runtime_dir, settings, model)
        fd = listener.fileno()
        environment = python_environment({"PROMETHEUS_MULTIPROC_DIR": str(runtime_dir / METRICS_NAME)})
        server = Child("server", [*python_command("server.process"), str(runtime_dir), str(fd)], environment, (fd,))
        command = ["-m", "benchmarks.front_end_engine", str(runtime_dir), str(token_id), str(steps_per_s)]
        engine = subprocess.Popen([sys.executable, *command], cwd=pathlib.Path(__file__).parents[1])
        server.start()
        assert server.pid is not None
        os.sched_setaffinity(server.pid, cores[-1:])
        for pid in (0, engine.pid):
            os.sched_setaffinity(pid, others)
        try:
            table = StepTable(runtime_dir)
            while not (ready_file(runtime_dir, server.pid).exists() and (runtime_dir / "engine.sock").exists()):
                time.sleep(0.05)
            time.sleep(0.5)  # the two meet
            yield listener.getsockname()[1], server.pid, engine.pid, table
        finally:
            engine.kill()
            engine.wait()
            server.kill()
            os.sched_setaffinity(0, cores)


def measure(path: str, streams: int, rate: float, output_tokens: int, window_s: float, port: int) -> Measurement:
    """Run one load and watch it for window_s seconds, once every stream flows and a second more."""
    with front_end(rate, port) as (port, server_pid, engine_pid, table):
        clients = Clients(port, path, streams, output_tokens)
        while not clients.all_flow:
            clients.read_until(time.monotonic() + 0.1)
        clients.read_until(time.monotonic() + 1)
        clients.arrivals.clear()
        clients.num_events = clients.num_bytes = 0
        start_time, server_start_s = time.monotonic(), cpu_s(server_pid)
        load_start_s = cpu_s(engine_pid) + time.process_time()
        clients.read_until(start_time + window_s)
        end_time, server_end_s = time.monotonic(), cpu_s(server_pid)
        load_end_s = cpu_s(engine_pid) + time.process_time()
        seeds, before, counts, times = (np.array(column) for column in zip(*clients.arrivals, strict=True))
        clients.close()
        counts = counts.astype(np.int64)
        # Token k of an arrival is number before + k of its request, which gets one in every step from its first on.
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        steps = np.repeat(table.first_steps[seeds] + before, counts) + offsets
        latencies = np.sort(np.repeat(times, counts) - table.times[steps])
        num_steps = int(np.count_nonzero((table.times >= start_time) & (table.times < end_time)))
    return Measurement(
        path,
        end_time - start_time,
        num_steps * streams,
        int(counts.sum()),
        clients.num_events,
        clients.num_bytes,
        server_end_s - server_start_s,
        load_end_s - load_start_s,
        latencies,
    )


HEAD = f"{'':<22}{'offered/s':>10}{'tokens/s':>10}{'events/s':>10}{'B/event':>9}{'CPU us/token':>14}"
HEAD += f"{'server':>8}{'load':>6}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}"


def row(m: Measurement) -> str:
    """One line of the table; server and load are shares of a core."""
    return (
        f"{m.path:<22}{m.num_offered / m.window_s:>10.0f}{m.num_tokens / m.window_s:>10.0f}"
        f"{m.num_events / m.window_s:>10.0f}{m.num_bytes / m.num_events:>9.0f}"
        f"{m.server_cpu_s / m.num_tokens * 1e6:>14.1f}{m.server_cpu_s / m.window_s:>8.0%}"
        f"{m.load_cpu_s / m.window_s:>6.0%}{m.quantile_ms(0.5):>9.1f}{m.quantile_ms(0.99):>9.1f}{m.quantile_ms(1):>9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, nargs="+", default=[100.0], help="tokens/s of each stream")
    parser.add_argument("--output-tokens", type=int, default=100_000, help="of a request; the next one follows at once")
    parser.add_argument("--window", type=float, default=10.0, help="seconds to watch")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--path", nargs="+", choices=list(BODIES), default=list(BODIES))
    arguments = parser.parse_args()
    print(HEAD)
    for path in arguments.path:
        for rate in arguments.rate:
            load = (arguments.streams, rate, arguments.output_tokens, arguments.window, arguments.port)
            print(row(measure(path, *load)), flush=True)


if __name__ == "__main__":
    main()
