"""The router over simulated replicas that come and go, with old statistics. `make bench BENCH=router`.

The router's own class (`server/ray/policy.py`) gets open-loop traffic: conversations that grow by a turn and begin with
one of a few system prompts. A replica runs some requests at once, for as long as their answers and what their prompts
lack in its cache take; others wait. Its statistics are sent now and then, and some replicas are replaced by empty ones.
Beside it, the same traffic goes to whoever is least busy by the same statistics, and to anyone. All is drawn from one
seed, on a clock of its own: only the microseconds of a pick are real, of CPU time, statistics included.
"""

import argparse
import dataclasses
import datetime
import heapq
import json
import pathlib
import random
import sys
import time
import tracemalloc
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.compare import machine
from weft.server.ray.policy import PrefixPolicy, ReplicaView

SCRATCH = pathlib.Path("build/bench")
POLICIES = ("prefix", "least busy", "random")
BLOCK_CHARS, SYSTEM_BLOCKS, TURN_BLOCKS, MAX_BLOCKS = 256, 8, 4, 48
NUM_SYSTEMS, CONVERSATIONS_PER_REPLICA = 5, 12
SLOTS, CACHED_BLOCKS = 8, 400
"""Requests that a replica runs at once, and blocks that its cache holds: some 15 conversations."""
ANSWER_S, BLOCK_S = 1.0, 0.02
"""Seconds of an answer, and of each block of a prompt that is not cached."""
TOLD_EVERY_S = 0.1
"""How often the router learns what replicas have sent since."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated: statistics are stats_s old at most, and `churn` of the replicas are replaced each second."""

    num_replicas: int
    policy: str
    seconds: float
    load: float = 0.6
    stats_s: float = 1.0
    churn: float = 0.005


@dataclass(frozen=True, slots=True)
class Result:
    """Shares are of the blocks of all prompts; the ideal is one cache without limits for all."""

    case: Case
    num_requests: int
    hit_rate: float
    ideal_hit_rate: float
    max_to_mean: float
    """Requests on the busiest replica beside the mean, on average over time."""
    waited_p99_s: float
    picks_of_dead: int
    us_per_pick: float
    num_prefixes: int


@dataclass(slots=True)
class Replica:
    """A simulated replica; `view` is what it last sent."""

    view: ReplicaView
    next_view_s: float
    num_running: int = 0
    waiting: deque[tuple[float, list[int]]] = field(default_factory=deque)
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def uncached(self, blocks: list[int]) -> int:
        """How many blocks it has to compute; they are cached then."""
        hits = next((i for i, block in enumerate(blocks) if block not in self.cache), len(blocks))
        for block in blocks:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHED_BLOCKS:
            self.cache.popitem(last=False)
        return len(blocks) - hits


class Traffic:
    """Conversations; each turn repeats all before it. A block is a number, which decides its text."""

    def __init__(self, number: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._next_block = NUM_SYSTEMS * SYSTEM_BLOCKS
        self._conversations = [self._begin() for _ in range(number)]

    def _begin(self) -> list[int]:
        first = min(int(self._random.expovariate(1.0)), NUM_SYSTEMS - 1) * SYSTEM_BLOCKS
        return list(range(first, first + SYSTEM_BLOCKS))

    def turn(self) -> list[int]:
        """The blocks of the next prompt."""
        index = self._random.randrange(len(self._conversations))
        if len(self._conversations[index]) >= MAX_BLOCKS:
            self._conversations[index] = self._begin()
        blocks = self._conversations[index]
        blocks.extend(range(self._next_block, self._next_block + TURN_BLOCKS))
        self._next_block += TURN_BLOCKS
        return list(blocks)


def text(blocks: list[int]) -> str:
    """The prompt as the router sees it."""
    return "".join(f"{block}".ljust(BLOCK_CHARS, ".") for block in blocks)


class Simulation:
    """One case; `run` yields the time now and then."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self._random = random.Random(seed)
        self._traffic = Traffic(case.num_replicas * CONVERSATIONS_PER_REPLICA, seed)
        self._policy = PrefixPolicy()
        self._replicas: dict[str, Replica] = {}
        self._ends: list[tuple[float, int, str]] = []
        self._num_joined = self._num_requests = self._num_hits = self._num_ideal = self._num_blocks = self._num_dead = 0
        self._seen: set[int] = set()
        self._waits: list[float] = []
        self._ratios: list[float] = []
        self._pick_s = 0.0
        for _ in range(case.num_replicas):
            self._join(self._random.uniform(0, case.stats_s))

    def run(self) -> Iterator[float]:
        """Simulate; yields the time each time that the router is told of the replicas."""
        mean_s = ANSWER_S + 2 * TURN_BLOCKS * BLOCK_S
        rate = self.case.load * SLOTS * self.case.num_replicas / mean_s
        now, told_s, churned = 0.0, 0.0, 0.0
        views: tuple[ReplicaView, ...] = ()
        while now < self.case.seconds:
            if now >= told_s:
                views, told_s = self._tell(now), now + TOLD_EVERY_S
                yield now
            step = self._random.expovariate(rate)
            now, churned = now + step, churned + step * self.case.churn * self.case.num_replicas
            while churned >= 1:  # the router still knows the one that left until it is told
                churned -= 1
                self._replicas.pop(self._random.choice(list(self._replicas)))
                self._join(now + self.case.stats_s)
            self._end(now)
            self._send(self._traffic.turn(), views, now)

    def result(self) -> Result:
        """What came of it."""
        waits = sorted(self._waits)
        return Result(
            case=self.case,
            num_requests=self._num_requests,
            hit_rate=self._num_hits / self._num_blocks,
            ideal_hit_rate=self._num_ideal / self._num_blocks,
            max_to_mean=sum(self._ratios) / len(self._ratios),
            waited_p99_s=waits[len(waits) * 99 // 100],
            picks_of_dead=self._num_dead,
            us_per_pick=self._pick_s / self._num_requests * 1e6,
            num_prefixes=len(self._policy._homes),
        )

    def _join(self, next_view_s: float) -> None:
        name = f"replica-{self._num_joined}"
        self._num_joined += 1
        self._replicas[name] = Replica(ReplicaView(name), next_view_s)

    def _tell(self, now: float) -> tuple[ReplicaView, ...]:
        loads = [r.num_running + len(r.waiting) for r in self._replicas.values()]
        if now > self.case.seconds / 3:  # until then caches and queues fill
            self._ratios.append(max(loads) * len(loads) / max(sum(loads), 1))
        for name, replica in self._replicas.items():
            if now >= replica.next_view_s:
                used = min(len(replica.cache) / CACHED_BLOCKS, 1.0)
                replica.view = ReplicaView(name, replica.num_running, len(replica.waiting), used)
                replica.next_view_s += self.case.stats_s
        return tuple(replica.view for replica in self._replicas.values())

    def _send(self, blocks: list[int], views: tuple[ReplicaView, ...], now: float) -> None:
        prompt = text(blocks) if self.case.policy == "prefix" else ""
        began = time.process_time()
        chosen = self._policy.choose(views, prompt, now) if self.case.policy != "random" else self._random.choice(views)
        self._pick_s += time.process_time() - began
        assert chosen is not None
        ideal = next((i for i, block in enumerate(blocks) if block not in self._seen), len(blocks))
        self._seen.update(blocks)
        self._num_requests += 1
        if (replica := self._replicas.get(chosen.id)) is None:  # it has left: the client asks again
            self._num_dead += 1
            return
        self._num_blocks += len(blocks)
        self._num_ideal += ideal
        replica.waiting.append((now, blocks))
        self._start(chosen.id, replica, now)

    def _start(self, name: str, replica: Replica, now: float) -> None:
        while replica.waiting and replica.num_running < SLOTS:
            arrived, blocks = replica.waiting.popleft()
            uncached = replica.uncached(blocks)
            self._num_hits += len(blocks) - uncached
            self._waits.append(now - arrived)
            replica.num_running += 1
            heapq.heappush(self._ends, (now + ANSWER_S + uncached * BLOCK_S, len(self._waits), name))

    def _end(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            ended_s, _, name = heapq.heappop(self._ends)
            if (replica := self._replicas.get(name)) is not None:
                replica.num_running -= 1
                self._start(name, replica, ended_s)


def full_memory_mb() -> float:
    """What a policy takes that remembers as many prefixes as it may."""
    views = tuple(ReplicaView(f"replica-{i}") for i in range(1000))
    tracemalloc.start()
    policy = PrefixPolicy()
    for number in range(1_000_000 // MAX_BLOCKS + 2):
        first = number * MAX_BLOCKS
        policy.choose(views, text(list(range(first, first + MAX_BLOCKS))), float(number))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / 1e6


def table(results: list[Result]) -> Table:
    """For a terminal."""
    made = Table()
    for title in ("replicas", "policy", "requests", "hit rate", "ideal", "max/mean", "p99 wait", "us a pick"):
        made.add_column(title, justify="left" if title == "policy" else "right")
    for one in results:
        made.add_row(
            f"{one.case.num_replicas:,}",
            one.case.policy,
            f"{one.num_requests:,}",
            f"{one.hit_rate:.1%}",
            f"{one.ideal_hit_rate:.1%}",
            f"{one.max_to_mean:.2f}",
            f"{one.waited_p99_s:.2f} s",
            f"{one.us_per_pick:.1f}",
        )
    return made


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.router", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000], help="(default: 10 100 1000)")
    parser.add_argument("--seconds", type=float, default=30.0, help="simulated for each row (default: 30)")
    parser.add_argument("--load", type=float, default=0.6, help="share of what the replicas can do (default: 0.6)")
    parser.add_argument("--stats", type=float, default=1.0, help="seconds between statistics of one (default: 1)")
    parser.add_argument("--churn", type=float, default=0.005, help="part replaced each second (default: 0.005)")
    parser.add_argument("--out", type=pathlib.Path, default=SCRATCH, help=f"folder of the results (default: {SCRATCH})")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the command."""
    options, console, here = parse(sys.argv[1:]), Console(), machine.describe()
    cases = [
        Case(number, policy, options.seconds, options.load, options.stats, options.churn)
        for number in options.replicas
        for policy in POLICIES
    ]
    results = []
    with Progress(console=console) as progress:
        bar = progress.add_task("simulated", total=sum(case.num_replicas for case in cases) * options.seconds)
        for case in cases:
            simulation, before = Simulation(case), 0.0
            for now in simulation.run():
                progress.advance(bar, (now - before) * case.num_replicas)
                before = now
            results.append(simulation.result())
    full_mb = full_memory_mb()
    console.print(table(results))
    console.print(f"a policy that remembers all it may takes {full_mb:.0f} MB")
    done = {
        "date": datetime.date.today().isoformat(),
        "command": f"make bench BENCH=router ARGS='{' '.join(sys.argv[1:])}'",
        "machine": dataclasses.asdict(here),
        "full_memory_mb": full_mb,
        "results": [dataclasses.asdict(one) for one in results],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "router.json"
    file.write_text(json.dumps(done, indent=1) + "\n")
    console.print(f"written: {file}")


if __name__ == "__main__":
    main()
