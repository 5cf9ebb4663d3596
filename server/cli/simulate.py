"""`weft simulate`: replays a trace over simulated replicas, and tells what clients would see of each number of them.

A child process simulates the engines; requests are routed here, by the router's own policy. A line of the trace is one
request, in the format of Mooncake's traces (Qin et al., 2024): `timestamp` in milliseconds, `input_length`,
`output_length`, and `hash_ids`, one for each block of the prompt, equal where prompts begin alike.
"""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weft.engine.wire.options import Arrive, Begin, EngineOptions, Finish, Finished, Load, Look, StepCosts, ToSimulation
from weft.server.ray.policy import PrefixPolicy, ReplicaView
from weft.server.settings import StartError
from weft.server.supervise.spawn import python_command

_STATS_S = 1.0
"""How old statistics of replicas become, which the router sees."""
_CHARS_PER_TOKEN = 4
"""Of the text that stands for a prompt before the router."""


class TraceLine(msgspec.Struct, frozen=True):
    """One request of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a number of replicas makes of a trace."""

    num_replicas: int
    finished: Finished
    seconds: float

    @property
    def output_rate(self) -> float:
        """Output tokens per second, from the first arrival to the last token."""
        return self.finished.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.finished.cached_tokens / max(self.finished.prompt_tokens, 1)

    def percentile(self, name: str, percent: float) -> float:
        """Milliseconds of `first_token_s` or `gaps_s`; 0 without any."""
        values: list[float] = getattr(self.finished, name)
        return float(np.percentile(values, percent)) * 1e3 if values else 0.0


def read_trace(path: Path, hash_tokens: int) -> list[TraceLine]:
    """Read a trace, in the order of time.

    Raises:
        StartError: The file cannot be read, or a line has a fault.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise StartError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    trace = [_read_line(f"{path}:{number}", line, hash_tokens) for number, line in enumerate(lines, 1) if line.strip()]
    if not trace:
        raise StartError(f"{path} holds no request")
    return sorted(trace, key=lambda line: line.timestamp)


def _read_line(where: str, text: bytes, hash_tokens: int) -> TraceLine:
    try:
        line = msgspec.json.decode(text, type=TraceLine)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartError(f"{where}: {error}") from None
    for name, least in (("timestamp", 0), ("input_length", 1), ("output_length", 1)):
        if (value := getattr(line, name)) < least:
            raise StartError(f"{where}: {name} must be at least {least}, got {value}")
    most = -(-line.input_length // hash_tokens)
    if len(line.hash_ids) > most:
        raise StartError(
            f"{where}: hash_ids must be at most {most}, one for each {hash_tokens} tokens of {line.input_length}, "
            f"got {len(line.hash_ids)} (--hash-tokens)"
        )
    for value in line.hash_ids:
        if not 0 <= value < 1 << 64:
            raise StartError(f"{where}: hash_ids must be at least 0 and below 2^64, got {value}")
    return line


class Simulator:
    """The child process; a context. Engines are measured when it is entered, unless `costs` exists."""

    def __init__(self, options: EngineOptions, costs: Path | None) -> None:
        """Take the options of every replica, and the file of what their steps cost."""
        self._options = options
        self._command = python_command("weft.engine.simulate", *([str(costs)] if costs else []))
        self.costs: StepCosts

    def __enter__(self) -> "Simulator":
        """Start it; exits with its code if it cannot load the model."""
        self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._write(self._options)
        self.costs = self._read(StepCosts)
        return self

    def __exit__(self, *_: object) -> None:
        """End it, whatever it does."""
        self._child.kill()
        if self._child.stdin:
            with contextlib.suppress(BrokenPipeError):  # of what was not flushed
                self._child.stdin.close()
        if self._child.stdout:
            self._child.stdout.close()
        self._child.wait()

    def replay(self, trace: Sequence[TraceLine], num_replicas: int, hash_tokens: int) -> Outcome:
        """Send a trace to so many empty replicas."""
        self._write(Begin(num_replicas))
        policy, told, views = PrefixPolicy(), -1.0, tuple[ReplicaView, ...]()
        first = trace[0].timestamp
        for line in track(trace, f"{num_replicas} replicas", transient=True):
            now = (line.timestamp - first) / 1e3
            if told < 0 or now >= told + _STATS_S:
                told, views = now, tuple(self._look(now))
            chosen = policy.choose(views, _text(line, hash_tokens), now)
            replica = views.index(chosen) if chosen else 0
            arrive = Arrive(replica, now, line.input_length, line.output_length, line.hash_ids, hash_tokens)
            self._write(arrive, flush=False)
        self._write(Finish())
        finished = self._read(Finished)
        return Outcome(num_replicas, finished, finished.end_s)

    def _look(self, now: float) -> Iterator[ReplicaView]:
        self._write(Look(now))
        for number, load in enumerate(self._read(list[Load])):
            yield ReplicaView(str(number), load.running, load.waiting, load.kv_usage)

    def _write(self, message: ToSimulation | EngineOptions, *, flush: bool = True) -> None:
        assert self._child.stdin
        try:
            self._child.stdin.write(msgspec.json.encode(message) + b"\n")
            if flush:
                self._child.stdin.flush()
        except BrokenPipeError:
            self._give_up()

    def _read(self, kind: type[Any]) -> Any:
        assert self._child.stdout
        if not (line := self._child.stdout.readline()):
            self._give_up()
        return msgspec.json.decode(line, type=kind)

    def _give_up(self) -> NoReturn:
        """The child has said why it ended."""
        raise SystemExit(self._child.wait() or 1)


def _text(line: TraceLine, hash_tokens: int) -> bytes:
    """What stands for the prompt before the router: as long as its text, and equal where hash ids are."""
    return b"".join(value.to_bytes(8, "little") * (hash_tokens * _CHARS_PER_TOKEN // 8) for value in line.hash_ids)


def table(outcomes: Sequence[Outcome]) -> Table:
    """For a terminal; times in milliseconds, at the median, of 90 and of 99 in 100."""
    made = Table()
    for title in ("replicas", "first token ms", "next token ms", "tokens/s", "cached", "busy", "refused"):
        made.add_column(title, justify="right", overflow="fold")
    for one in outcomes:
        times = (
            " ".join(f"{one.percentile(name, percent):,.0f}" for percent in (50, 90, 99))
            for name in ("first_token_s", "gaps_s")
        )
        busy = one.finished.busy_s / max(one.seconds * one.num_replicas, 1e-9)
        refused = ", ".join(f"{number} {why.lower()}" for why, number in one.finished.refused.items()) or "0"
        made.add_row(
            str(one.num_replicas), *times, f"{one.output_rate:,.0f}", f"{one.hit_rate:.1%}", f"{busy:.0%}", refused
        )
    return made


def simulate(options: EngineOptions, path: Path, replicas: Sequence[int], hash_tokens: int, costs: Path | None) -> None:
    """Run the command.

    Raises:
        StartError: An argument or the trace has a fault.
    """
    if min(replicas) < 1:
        raise StartError(f"--replicas must be at least 1, got {min(replicas)}")
    if hash_tokens < 1:
        raise StartError(f"--hash-tokens must be at least 1, got {hash_tokens}")
    if costs is not None and (costs.is_dir() or not costs.parent.is_dir()):
        raise StartError(f"--costs: {costs} must be a file in a folder that exists")
    trace = read_trace(path, hash_tokens)
    with Simulator(options, costs) as simulator:
        outcomes = [simulator.replay(trace, number, hash_tokens) for number in replicas]
        console = Console()
        console.print(table(outcomes))
        error = simulator.costs.median_error
        print(f"{len(trace):,} requests; steps as on {simulator.costs.device}; half predicted within {error:.0%}")
