"""Computes each step with several processes, each with a part of every layer (tensor parallelism).

Rank 0 is the engine's process. The others are its children. They get each batch over a pipe before rank 0 launches its
own part, and compute hidden states and logits; rank 0 alone samples, so the next step is launched when its ids are
known. A rank that ends takes the engine with it, at once, and the engine its ranks. While a rank hangs, rank 0 waits
for it and gives no sign of life. The supervisor mends both with a new engine.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its list
from typing_extensions import override

from weft.engine.kernels.caches import Caches
from weft.engine.models.decoder import Model
from weft.engine.models.facts import ModelFacts
from weft.engine.run.config import EngineConfig
from weft.engine.run.model_runner import LaunchedStep, ModelRunner
from weft.engine.sampling.sampler import SamplingKit
from weft.engine.step.batch import Batch
from weft.engine.step.masks import RowMasks

logger = logging.getLogger(__name__)

_HERE = "127.0.0.1"
_MEETING = timedelta(hours=1)
"""Longest wait of a rank for others that still load."""
_PATIENCE_S = 1.0
"""Pause before a failed step ends the engine. If it failed because another rank has ended, that is said, and ends it,
first."""


@dataclass(frozen=True, slots=True)
class RankTask:
    """What another rank is told when it starts; the ranks meet at a port of this machine."""

    model: ModelFacts
    config: EngineConfig
    num_threads: int
    port: int

    def join(self, store: TCPStore | None = None) -> None:
        """Meet the other ranks, on the CPU or between GPUs of this machine. Waits until all have loaded their part.

        Args:
            store: Listens at the port; the first rank has it.
        """
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        size = self.config.options.tensor_parallel_size
        dist.init_process_group(
            "nccl" if self.config.device.type == "cuda" else "gloo",
            store=store or TCPStore(_HERE, self.port, size, timeout=_MEETING),
            rank=self.config.rank,
            world_size=size,
            timeout=timedelta(days=1),  # a shorter one is the supervisor's
        )


def least_of_ranks(value: int, device: torch.device) -> int:
    """The least of the values with which all ranks call it."""
    values = torch.tensor(value, device=device)
    dist.all_reduce(values, dist.ReduceOp.MIN)
    return int(values)


class Ranks:
    """The processes of all ranks but the first."""

    def __init__(self, model: ModelFacts, config: EngineConfig) -> None:
        """Start them; they load their parts while this rank loads its own."""
        size = config.options.tensor_parallel_size
        self._store = TCPStore(_HERE, 0, size, is_master=True, timeout=_MEETING, wait_for_workers=False)
        self.task = RankTask(model, config, torch.get_num_threads(), self._store.port)
        self._links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_closed = False
        for rank in range(1, size):
            ours, theirs = Pipe()
            fd = theirs.fileno()
            command = [sys.executable, "-P", "-m", "weft.engine.run.launch", "weft.engine.run.rank_process"]
            process = subprocess.Popen([*command, str(fd), str(os.getpid())], stdin=subprocess.DEVNULL, pass_fds=[fd])
            theirs.close()
            ours.send(replace(self.task, config=replace(config, rank=rank)))
            self._links.append(ours)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def join(self) -> None:
        """Meet them."""
        self.task.join(self._store)

    def send(self, batch: Batch) -> None:
        """Let the others compute their parts of a batch."""
        for link in self._links:
            link.send(batch)

    def close(self) -> None:
        """End the others and wait for that."""
        self._is_closed = True
        for link in self._links:
            link.close()
        for process in self._processes:
            process.wait()
        dist.destroy_process_group()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if not self._is_closed:
            logger.error("rank %d has ended (%d), and the engine ends with it", rank, code)
            if code < 0:  # as the rank did, which tells the supervisor whether a request is to blame
                os.kill(os.getpid(), -code)
            os._exit(max(code, 1))  # if it could not load its part, the code says so


class RankedRunner(ModelRunner):
    """The executor of all ranks, in the process of the first."""

    def __init__(self, ranks: Ranks, model: Model, caches: Caches, device: torch.device, sampling: SamplingKit) -> None:
        """Take over the other ranks, and the model and caches of this one."""
        super().__init__(model, caches, device, sampling=sampling)
        self._ranks = ranks

    @override
    def launch_once(self, batch: Batch, masks: "Future[RowMasks] | None" = None) -> LaunchedStep:
        """See `ModelRunner`. A failure, for want of memory too, leaves ranks waiting for others: it ends the engine."""
        try:
            self._ranks.send(batch)
            return super().launch_once(batch, masks)
        except Exception:
            time.sleep(_PATIENCE_S)
            logger.exception("a step failed on rank 0, and the engine ends, since the ranks may wait for each other")
            os._exit(1)

    @override
    def prepare(self) -> bool:
        return False  # what there is to prepare would have to be computed by all

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()
