"""The protocol of what computes the engine's steps: a runner in this process, or ranks in other processes.

Batches, masks and results are plain data, so that they can cross a process boundary; an executor elsewhere waits for
the masks before it sends. An executor never sees a request. Steps
run in the order of their launches.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

from weft.engine.step.batch import Batch
from weft.engine.step.masks import RowMasks
from weft.engine.step.step_result import StepResult

# What an executor keeps of a step until it is collected.
Launched = TypeVar("Launched")


class Executor(Protocol[Launched]):
    """Computes batches. `weft.engine.runner.model_runner.ModelRunner` is the executor of one rank."""

    def launch(self, batch: Batch, masks: "Future[RowMasks] | None") -> Launched:
        """Queue a step. masks are for the rows that follow a grammar; sampling waits for them."""
        ...

    def collect(self, launched: Launched) -> StepResult:
        """Wait for the results of a step."""
        ...

    def prepare(self) -> bool:
        """Spend idle time on work that steps would wait for; returns whether more is left."""
        ...

    def load_adapter(self, slot: int, folder: Path) -> "Future[str]":
        """Read an adapter in the background and put it in a slot, from 1, that no request of a step in flight uses.

        The future brings the `Adapter.content` that was read. It fails with ModelError if this is not one of the model.
        """
        ...

    def check_device(self) -> None:
        """Wait for the device; raises if it has failed."""
        ...
