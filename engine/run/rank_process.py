"""The process of a rank behind the first: loads its part of the model, then computes every batch that comes.

It is a child of the engine, dies with it, and exits with code 0 when the engine closes the pipe.
"""

import logging
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from weft.engine.kernels.torch.sampling import TORCH_SAMPLING
from weft.engine.offload.block_bytes import BlockBytes
from weft.engine.offload.ranked_blocks import obey
from weft.engine.run.kernel_choice import make_caches, set_num_threads
from weft.engine.run.memory_plan import MemoryPlan
from weft.engine.run.model_choice import plan_model
from weft.engine.run.process import cannot_load, follow_parent
from weft.engine.run.ranks import FollowingRunner, LoadAdapter, RankTask
from weft.engine.run.startup import measure_memory
from weft.engine.shared import logs
from weft.engine.shared.garbage import collect_rarely
from weft.engine.step.batch import Batch

_SHOW_EVERY_S = 1.0


def main(fd: int, engine: int) -> int:
    """Compute what comes over the pipe from the engine, whose process number is given."""
    if not follow_parent(engine):
        return 1
    link = Connection(fd)
    task: RankTask = link.recv()
    logs.configure(task.config.options.log_format, f"rank {task.config.rank}")
    logging.disable(logging.WARNING)  # of which the first rank says the same
    try:
        runner, blocks = _load(task, link)
    except Exception as error:
        return cannot_load(error)
    collect_rarely()
    try:
        while True:
            message = link.recv()
            if isinstance(message, Batch):
                runner.follow(message)
            elif isinstance(message, LoadAdapter):
                runner.load_adapter(message.slot, message.folder)
            else:
                obey(blocks, message)
    except EOFError:
        return 0


def _load(task: RankTask, link: Connection) -> tuple[FollowingRunner, BlockBytes]:
    """As the engine does it, which hears of the progress and plans the memory of all ranks."""
    config, shown = task.config, time.monotonic()

    def show_progress(done: int, total: int) -> None:
        nonlocal shown
        if (now := time.monotonic()) - shown >= _SHOW_EVERY_S:
            shown = now
            link.send(done)

    torch.set_grad_enabled(False)
    torch.set_num_threads(task.num_threads)
    if config.device.type == "cuda":
        torch.cuda.set_device(config.rank)
    chosen = plan_model(task.model, config)
    model = chosen.load(config.model, show_progress)
    link.send(None)
    task.join()
    measure_memory(model, task.model, config, chosen.groups, None)
    plan: MemoryPlan = link.recv()
    config = replace(config, max_num_seqs=plan.max_num_seqs)
    caches = make_caches(chosen.groups, plan.num_blocks, config, task.model.num_heads, plan.num_states)
    asked = config.options.kernels.get("threads")
    set_num_threads(chosen.kit, caches, TORCH_SAMPLING, int(asked or task.num_threads))
    has_head = config.rank < config.options.tensor_parallel_size
    parts = model, caches, config.device
    runner = FollowingRunner(*parts, overlap=config.overlap, has_head=has_head, adapters=chosen.adapters)
    return runner, BlockBytes(caches.blocks(chosen.groups), config.device)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
