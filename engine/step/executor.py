"""The seam between the engine and what computes its steps: a runner in this process, or ranks in other processes.

What goes in and comes out is plain data, so that the same call can cross a process boundary. An executor never sees a
request. Steps run in the order in which they are launched.
"""

from concurrent.futures import Future
from typing import Protocol, TypeVar

from weft.engine.step.batch import Batch
from weft.engine.step.masks import RowMasks
from weft.engine.step.step_result import StepResult

Launched = TypeVar("Launched")
"""What an executor keeps of a step until it is collected."""


class Executor(Protocol[Launched]):
    """Computes batches. `weft.engine.run.model_runner.ModelRunner` is the executor of one rank."""

    def launch(self, batch: Batch, masks: "Future[RowMasks] | None") -> Launched:
        """Queue a step; masks are those of its rows that follow a grammar, waited for before rows are sampled."""
        ...

    def collect(self, launched: Launched) -> StepResult:
        """Wait for it."""
        ...

    def prepare(self) -> bool:
        """Spend idle time on what steps would have to wait for; returns whether there is more of it."""
        ...

    def check_device(self) -> None:
        """Raise if the device computes nothing any more."""
        ...
