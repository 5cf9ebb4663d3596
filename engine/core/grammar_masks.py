"""Computes the grammar masks of a step in a thread, while the device computes the forward pass."""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from weft.engine.schedule.scheduler import ScheduledRequest, ScheduledStep
from weft.engine.step.masks import RowMasks


class MaskComputer:
    """Owner of the thread. It uses a matcher only between `begin` and the end of the future."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._pool = ThreadPoolExecutor(1, "masks")

    def begin(self, step: ScheduledStep) -> "Future[RowMasks] | None":
        """Start to compute the masks of a step that is about to be launched; None if no row has a grammar."""
        guided = [s for s in step.requests if s.request.grammar is not None and s.num_rows]
        return self._pool.submit(self._compute, guided) if guided else None

    def _compute(self, guided: list[ScheduledRequest]) -> RowMasks:
        rows = np.concatenate([np.arange(s.first_row, s.first_row + s.num_rows) for s in guided])
        bits = np.full((len(rows), -(-self._vocab_size // 32)), -1, np.int32)
        first = 0
        for scheduled in guided:
            assert scheduled.request.grammar is not None
            scheduled.request.grammar.fill_masks(scheduled.draft_token_ids, bits[first : first + scheduled.num_rows])
            first += scheduled.num_rows
        return RowMasks(rows, bits)
