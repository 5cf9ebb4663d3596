"""What a measurement ran on, and what that machine could do at best."""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.compare.workloads import Workload

_READ_BYTES = 1 << 30  # more than any cache


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, in words and numbers."""

    cpu: str
    num_cores: int
    memory_gib: float
    system: str
    memory_read_gb_per_s: float
    """The best of some reads of one gigabyte with all cores, before and after all else."""
    load_average: float
    """Of the last minute, before the measurement began: what else was going on."""
    commit: str | None
    """Of this repository; None outside one."""


def describe() -> Machine:
    """Look at the machine; takes about a second."""
    return Machine(
        cpu=_cpu_name(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        system=f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}",
        load_average=os.getloadavg()[0],
        memory_read_gb_per_s=round(read_bandwidth() / 1e9, 1),
        commit=commit(),
    )


def read_bandwidth(num_bytes: int = _READ_BYTES, num_rounds: int = 6) -> float:
    """Return bytes per second that all cores together read from memory, in the best round."""
    num_threads = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(num_bytes // 8, np.uint64), num_threads)
    best_s = float("inf")
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(num_rounds):
            start = time.perf_counter()
            list(threads.map(np.bitwise_or.reduce, parts))  # the plainest of reductions: nothing but the reads costs
            best_s = min(best_s, time.perf_counter() - start)
    return num_bytes / best_s


@dataclass(frozen=True, slots=True)
class Model:
    """What of a checkpoint decides how long a decode step takes at least."""

    name: str
    vocab_size: int
    weight_bytes: int
    """Read in each step."""
    kv_bytes_per_token: int

    def floor_ms(self, workload: Workload, bytes_per_s: float) -> float:
        """Milliseconds in which weights, keys and values of a workload's mean decode step can be read."""
        cache = workload.concurrency * workload.mean_context * self.kv_bytes_per_token
        return (self.weight_bytes + cache) / bytes_per_s * 1e3


def read_model(folder: pathlib.Path) -> Model:
    """Read the sizes of a checkpoint in Hugging Face layout, of a dense model whose keys and values have 16 bits."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values = config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not config.get("tie_word_embeddings", False):
        weights -= config["vocab_size"] * config["hidden_size"] * 2  # of the embedding a step reads some rows alone
    return Model(folder.name, config["vocab_size"], weights, 2 * values * 2)


def _cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def refuse_changes(parser: argparse.ArgumentParser, out: pathlib.Path | None) -> None:
    """End the command if figures are to be kept and the working tree has changes: they are those of a commit."""
    found = commit()
    if out and found and found.endswith("-dirty"):
        parser.error(f"--out keeps figures of a commit, and the working tree has changes beside {found}")


def commit() -> str | None:
    """Return the commit of this repository, with "-dirty" behind it where tracked files differ; None outside one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None
