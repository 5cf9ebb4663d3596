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
import random
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks import sources
from benchmarks.front_end_engine import StepTable
from weft.server.settings import Settings
from weft.server.supervise.child import Child
from weft.server.supervise.runtime_folder import engine_folder, runtime_folder
from weft.server.supervise.spawn import python_command
from weft.server.supervise.supervisor import listen, ready_file
from weft.server.text.tokenizer import Tokenizer

CHECKPOINT = pathlib.Path(__file__).parents[1] / "server" / "demo_model"
TOKEN_TEXT, TOKEN_MARK, EVENT_MARK = "Z", b"Z", b"]"
"""The mark of a token is in no header, id or key; that of an event is there once, as the end of its choices."""
LOOK_S = 0.001
"""Clients look this often instead of waiting, so that no write of the server has to wake them: on a virtual machine
that costs more than the write, and clients elsewhere would not be woken by it. Adds up to as much to each latency."""
START_S = 30.0
"""Seconds that anything may take before the watch begins."""
END = b"0\r\n\r\n"
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Who is the best of them all?"}]},
    "/v1/completions": {"prompt": "The best of them all is"},
}


@dataclass(frozen=True, slots=True)
class Load:
    """How many streams, tokens/s of each, and tokens of a request, give or take a half."""

    num_streams: int
    rate: float
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """What runs."""

    port: int
    server_pid: int
    engine_pid: int
    table: StepTable


@dataclass(slots=True)
class Stream:
    """One connection; it asks anew whenever its answer ends."""

    sock: socket.socket
    seed: int = 0
    num_left: int = 0
    num_tokens: int = 0
    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row. `latencies` of every token that arrived, in seconds."""

    path: str
    window_s: float
    num_offered: int
    num_events: int
    num_bytes: int
    server_cpu_s: float
    load_cpu_s: float
    latencies: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens that arrived."""
        return len(self.latencies)

    def quantile_ms(self, q: float) -> float:
        """Added latency in milliseconds."""
        return float(np.quantile(self.latencies, q)) * 1e3


class Clients:
    """All streams in one loop; they count, and take note of when what arrived."""

    def __init__(self, port: int, path: str, load: Load) -> None:
        """Connect, and ask on every connection."""
        self._path = path
        self._num_output_tokens = load.num_output_tokens
        self._num_asked = 0
        self._random = random.Random(0)
        self._epoll = select.epoll()
        self._streams: dict[int, Stream] = {}
        self.arrivals: list[tuple[int, int, int, float]] = []  # (seed, tokens before, tokens, time)
        self.num_events = self.num_bytes = 0
        for _ in range(load.num_streams):
            sock = socket.create_connection(("127.0.0.1", port))
            stream = self._streams[sock.fileno()] = Stream(sock)
            self._epoll.register(sock, select.EPOLLIN)
            self._ask(stream)

    def read_until_all_flow(self) -> None:
        """Read until every connection has got a token."""
        end_time = time.monotonic() + START_S
        while any(not stream.has_begun for stream in self._streams.values()):
            if time.monotonic() > end_time:
                raise SystemExit(f"not every stream had a token after {START_S} s")
            self.read_until(time.monotonic() + 0.1)

    def read_until(self, end_time: float) -> None:
        """Read whatever comes, until end_time on the clock of `time.monotonic`."""
        while time.monotonic() < end_time:
            for number, _ in self._epoll.poll(0):
                self._read(self._streams[number])
            time.sleep(LOOK_S)

    def forget(self) -> None:
        """Begin to count anew."""
        self.arrivals.clear()
        self.num_events = self.num_bytes = 0

    def close(self) -> None:
        """Leave, in the middle of every stream."""
        for stream in self._streams.values():
            stream.sock.close()
        self._epoll.close()

    def _ask(self, stream: Stream) -> None:
        stream.seed, stream.num_tokens = self._num_asked, 0
        stream.num_left = max(1, int(self._num_output_tokens * self._random.uniform(0.5, 1.5)))
        self._num_asked += 1
        options = {"stream": True, "seed": stream.seed, "max_tokens": stream.num_left, "ignore_eos": True}
        body = json.dumps(BODIES[self._path] | options)
        head = f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
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
        stream.num_left -= num_tokens
        stream.has_begun = stream.has_begun or num_tokens > 0
        if stream.num_left == 0 and data.endswith(END):
            self._ask(stream)


def cpu_s(pid: int) -> float:
    """CPU time that a process has used, with all its threads."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def front_end(steps_per_s: float, port: int) -> Iterator[FrontEnd]:
    """A server process alone on the last core, and a fake engine, which shares the others with the clients."""
    cores = sorted(os.sched_getaffinity(0))
    others = cores[:-1] or cores
    settings = Settings(served_model_name=("m",), model=str(CHECKPOINT)).model_dump_json().encode()
    (token_id,) = Tokenizer.load(CHECKPOINT).encode(TOKEN_TEXT, False)
    with runtime_folder() as runtime_dir, listen("127.0.0.1", port) as listener:
        fd = listener.fileno()
        environment = sources.environment()
        folder = engine_folder(runtime_dir, 0)
        arguments = (str(folder), str(token_id), str(steps_per_s))
        engine = Child("engine", python_command("benchmarks.front_end_engine", *arguments), environment)
        command = python_command("weft.server.app.process", str(runtime_dir), str(fd))
        server = Child("server", command, environment, (fd,), settings)
        try:
            for child, its_cores in ((engine, others), (server, cores[-1:])):
                os.sched_setaffinity(0, its_cores)  # which a child inherits
                child.start()
            os.sched_setaffinity(0, others)
            assert engine.pid is not None and server.pid is not None
            end_time = time.monotonic() + START_S
            while not (ready_file(runtime_dir, server.pid).exists() and is_ready(listener.getsockname()[1])):
                if time.monotonic() > end_time:
                    raise SystemExit(f"the server was not ready after {START_S} s")
                time.sleep(0.05)
            yield FrontEnd(listener.getsockname()[1], server.pid, engine.pid, StepTable(folder))
        finally:
            server.kill()
            engine.kill()
            os.sched_setaffinity(0, cores)


def is_ready(port: int) -> bool:
    """Whether the server has found its engine."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return b" 200 " in sock.recv(1024).split(b"\r\n")[0]


def measure(path: str, load: Load, window_s: float, port: int = 0) -> Measurement:
    """Watch a load for window_s seconds, beginning a second after every stream flows."""
    with front_end(load.rate, port) as running:
        clients = Clients(running.port, path, load)
        clients.read_until_all_flow()
        clients.read_until(time.monotonic() + 1)
        clients.forget()
        start_time, server_cpu_s = time.monotonic(), -cpu_s(running.server_pid)
        load_cpu_s = -cpu_s(running.engine_pid) - time.process_time()
        clients.read_until(start_time + window_s)
        end_time = time.monotonic()
        server_cpu_s += cpu_s(running.server_pid)
        load_cpu_s += cpu_s(running.engine_pid) + time.process_time()
        clients.close()
        table = running.table
        num_offered = int(table.num_tokens[(table.times >= start_time) & (table.times < end_time)].sum())
        latencies = added_latencies(clients.arrivals, table)
    return Measurement(
        path=path,
        window_s=end_time - start_time,
        num_offered=num_offered,
        num_events=clients.num_events,
        num_bytes=clients.num_bytes,
        server_cpu_s=server_cpu_s,
        load_cpu_s=load_cpu_s,
        latencies=latencies,
    )


def added_latencies(arrivals: list[tuple[int, int, int, float]], table: StepTable) -> np.ndarray:
    """Seconds from the hand-over of its step to its arrival, for each token."""
    seeds, before, counts = np.array([arrival[:3] for arrival in arrivals], np.int64).reshape(-1, 3).T
    times = np.array([arrival[3] for arrival in arrivals])
    # Token k of an arrival is number before + k of its request, which gets one in every step from its first on.
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    steps = np.repeat(table.first_steps[seeds] + before, counts) + offsets
    return np.asarray(np.repeat(times, counts) - table.times[steps])


HEAD = f"{'':<22}{'offered/s':>10}{'tokens/s':>10}{'events/s':>10}{'B/event':>9}{'CPU us/token':>14}"
HEAD += f"{'server':>8}{'load':>6}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}"


def row(m: Measurement) -> str:
    """One line of the table; server and load are shares of a core."""
    return (
        f"{m.path:<22}{m.num_offered / m.window_s:>10.0f}{m.num_tokens / m.window_s:>10.0f}"
        f"{m.num_events / m.window_s:>10.0f}{m.num_bytes / m.num_events:>9.0f}"
        f"{m.server_cpu_s / m.num_tokens * 1e6:>14.1f}{m.server_cpu_s / m.window_s:>8.0%}"
        f"{m.load_cpu_s / m.window_s:>6.0%}"
        f"{m.quantile_ms(0.5):>9.1f}{m.quantile_ms(0.99):>9.1f}{m.quantile_ms(1):>9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, nargs="+", default=[100.0], help="tokens/s of each stream")
    parser.add_argument("--output-tokens", type=int, default=100_000, help="of a request, +- 50 %%; the next follows")
    parser.add_argument("--window", type=float, default=10.0, help="seconds to watch")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--path", nargs="+", choices=list(BODIES), default=list(BODIES))
    arguments = parser.parse_args()
    print(HEAD)
    for path in arguments.path:
        for rate in arguments.rate:
            load = Load(arguments.streams, rate, arguments.output_tokens)
            print(row(measure(path, load, arguments.window, arguments.port)), flush=True)


if __name__ == "__main__":
    main()
