"""Computes each step with several processes, each with a part of every layer (tensor parallelism).

Rank 0 is the engine's process. The others are its children. They get each batch over a pipe before rank 0 launches its
own part, and compute hidden states; rank 0 alone samples, so the next step is launched when its ids are known. A rank
that ends takes the engine with it, at once, and the engine its ranks. While a rank hangs, rank 0 waits for it and gives
no sign of life. The supervisor mends both with a new engine.
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
from shutil import rmtree
from tempfile import mkdtemp

import torch
import torch.distributed as dist
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

_PATIENCE_S = 1.0
"""Pause before a failed step ends the engine. If it failed because another rank has ended, that is said, and ends it,
first."""


@dataclass(frozen=True, slots=True)
class RankTask:
    """What another rank is told when it starts; folder is where the ranks meet."""

    model: ModelFacts
    config: EngineConfig
    num_threads: int
    folder: str

    def join(self) -> None:
        """Meet the other ranks, on the CPU or between GPUs of this machine. Waits until all are there."""
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if self.config.device.type == "cuda" else "gloo",
            init_method=f"file://{self.folder}/ranks",
            rank=self.config.rank,
            world_size=self.config.options.tensor_parallel_size,
            timeout=timedelta(days=1),  # a shorter one is the supervisor's
        )
        least_of_ranks(0, self.config.device)  # behind it nobody looks into the folder any more
        if self.config.rank == 0:
            rmtree(self.folder)


def least_of_ranks(value: int, device: torch.device) -> int:
    """The least of the values with which all ranks call it."""
    values = torch.tensor(value, device=device)
    dist.all_reduce(values, dist.ReduceOp.MIN)
    return int(values)


class Ranks:
    """The processes of all ranks but the first."""

    def __init__(self, model: ModelFacts, config: EngineConfig) -> None:
        """Start them; they load their parts while this rank loads its own."""
        self.task = RankTask(model, config, torch.get_num_threads(), mkdtemp(prefix="weft-ranks-"))
        self._links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_closed = False
        for rank in range(1, config.options.tensor_parallel_size):
            ours, theirs = Pipe()
            fd = theirs.fileno()
            command = [sys.executable, "-P", "-m", "weft.engine.run.launch", "weft.engine.run.rank_process", str(fd)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[fd])
            theirs.close()
            ours.send(replace(self.task, config=replace(config, rank=rank)))
            self._links.append(ours)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

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
            rmtree(self.task.folder, ignore_errors=True)
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
    @torch.inference_mode()
    def launch(self, batch: Batch, masks: "Future[RowMasks] | None" = None) -> LaunchedStep:
        """See `ModelRunner`. A failure, for want of memory too, leaves ranks waiting for others: it ends the engine."""
        try:
            self._ranks.send(batch)
            return self._launch(batch, masks)
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
