"""The process of a rank behind the first: loads its part of the model, then computes every batch that comes.

It is a child of the engine, or of what follows the engine on another machine, dies with it, and exits with code 0 when
the engine closes the link.
"""

import contextlib
import logging
import pathlib
import socket
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch

from weft.engine.batch import Batch
from weft.engine.cache.block_bytes import BlockBytes, ReadBlock, WriteBlock, obey
from weft.engine.config import check_gpus
from weft.engine.kernels.choice import make_caches, set_num_threads
from weft.engine.kernels.torch.layer_kernels import TORCH_SAMPLING
from weft.engine.layers.block import Decoder
from weft.engine.memory_plan import MemoryPlan
from weft.engine.ranks.ranked_runner import FollowingRunner
from weft.engine.ranks.ranks import (
    AdapterEnd,
    DropFeatures,
    Fault,
    KeepFeatures,
    Link,
    LoadAdapter,
    Progress,
    RankTask,
    meet,
    share_cores,
)
from weft.engine.start.launch import cannot_load, follow_parent
from weft.engine.start.model_choice import plan_model, read_model
from weft.engine.start.warm_up import measure_memory
from weft.engine.vision.checkpoint import as_served, served_vision
from weft.engine.vision.eyes import Eyes
from weft.engine.wire import errors as logs
from weft.engine.wire.errors import first_line
from weft.engine.wire.machine import collect_rarely

_SHOW_EVERY_S = 1.0


def main(fd: int, parent: int, model: str) -> int:
    """Compute what comes over the socket from the engine.

    Args:
        parent: Number of the process that started this one.
        model: Folder of the model on this machine.
    """
    if not follow_parent(parent):
        return 1
    link = Link(socket.socket(fileno=fd))
    try:
        task = link.recv()
        assert isinstance(task, RankTask)
        config = replace(task.config, model=pathlib.Path(model))
        logs.configure(config.options.log_format, f"rank {config.rank}")
        logging.disable(logging.WARNING)  # of which the first rank says the same
        try:
            runner, blocks = _load(replace(task, config=config), link)
        except Exception as error:
            link.send(Fault(first_line(error)))
            return cannot_load(error)
        collect_rarely()
        while True:
            message = link.recv()
            if isinstance(message, Batch):
                runner.follow(message)
            elif isinstance(message, KeepFeatures | DropFeatures):
                runner.see(message)
            elif isinstance(message, LoadAdapter):
                runner.load_adapter(message.slot, message.folder).add_done_callback(partial(_tell_end, link))
            else:
                assert isinstance(message, ReadBlock | WriteBlock)
                obey(blocks, message)
    except (EOFError, ConnectionError, TimeoutError):  # the engine has ended, or its machine is out of reach
        return 0


def _tell_end(link: Link, loading: "Future[str]") -> None:
    error = loading.exception()
    with contextlib.suppress(OSError):  # the engine has ended
        link.send(AdapterEnd(None, loading.result()) if error is None else AdapterEnd(first_line(error)))


def _load(task: RankTask, link: Link) -> tuple[FollowingRunner, BlockBytes]:
    """As the engine does it, which hears of the progress and plans the memory of all ranks."""
    config, shown = task.config, time.monotonic()

    def show_progress(done: int, total: int) -> None:
        nonlocal shown
        if (now := time.monotonic()) - shown >= _SHOW_EVERY_S:
            shown = now
            link.send(Progress(is_loaded=False))

    torch.set_grad_enabled(False)
    share_cores(config)
    num_threads = torch.get_num_threads()
    if config.device.type == "cuda":
        check_gpus(config.options)
        torch.cuda.set_device(config.rank % len(config.options.ranks_here))
    facts = as_served(read_model(config.model, config.options.model_impl, None), config.options)
    chosen = plan_model(facts, config)
    model = chosen.load(config.model, show_progress)
    link.send(Progress(is_loaded=True))
    meet(task)
    measure_memory(model, facts, config, chosen.groups, None)
    plan = link.recv()
    assert isinstance(plan, MemoryPlan)
    config = replace(config, max_num_seqs=plan.max_num_seqs)
    sizes, scales = (plan.num_blocks, config, facts.num_heads, plan.num_states), chosen.kv_scales(config.model)
    caches = make_caches(chosen.groups, *sizes, scales)
    asked = config.options.kernels.get("threads")
    set_num_threads(chosen.kernels, caches, TORCH_SAMPLING, int(asked or num_threads))
    has_head = config.rank < config.options.tensor_parallel_size
    parts = model, caches, config.device
    vision = served_vision(facts.vision, config.options)
    eyes = Eyes(model, None, config.device, vision.embedded_id) if vision and isinstance(model, Decoder) else None
    runner = FollowingRunner(*parts, overlap=config.overlap, has_head=has_head, adapters=chosen.adapters, eyes=eyes)
    return runner, BlockBytes(caches.blocks(chosen.groups), config.device)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
