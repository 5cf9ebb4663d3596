"""Which adapter each row of a step uses, and the sites of a model where adapters add something."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch

from weft.engine.step.batch import Batch, Ints
from weft.engine.step.transfer import to_device


class Delta(NamedTuple):
    """What an adapter adds to neighbouring outputs of a matrix, b (a x), from output `first` on.

    a is (rank, in_features), b (outputs, rank) with the adapter's scale.
    """

    first: int
    a: torch.Tensor
    b: torch.Tensor


class StepRows:
    """The slots of the adapters of some rows, (num_rows,), 0 for none, in the forms that kernels want."""

    def __init__(self, slots: Ints, device: torch.device) -> None:
        """Sort the rows by slot."""
        self.slots, self._device = slots, device
        num_plain = int(np.count_nonzero(slots == 0))
        order = np.argsort(slots, kind="stable")
        self.order = np.concatenate((order[num_plain:], order[:num_plain]))
        """The rows, those of an adapter together, and those of none last."""
        num_adapted = len(slots) - num_plain
        used, starts = np.unique(slots[self.order[:num_adapted]], return_index=True)
        ends = [*starts[1:].tolist(), num_adapted][: len(used)]
        self.groups = list(zip(used.tolist(), starts.tolist(), ends, strict=True))
        """Of each adapter in use its slot, and where its rows begin and end among those in order."""
        self.prepared: object = None
        """What the sites of a device made of the rows."""

    @cached_property
    def by_slot(self) -> list[tuple[int, torch.Tensor]]:
        """The slots in use, and the rows of each on the device."""
        order = to_device(self.order, self._device)
        return [(slot, order[start:end]) for slot, start, end in self.groups]


class Site(Protocol):
    """A place where adapters add something: the outputs of one matrix."""

    num_reserved_bytes: int
    """Memory for all slots that is allocated when adapters come; 0 if it is allocated already."""

    def put(self, slot: int, deltas: Sequence[Delta]) -> None:
        """Replace what the adapter of a slot adds; no step that runs uses the slot."""

    def add(self, outputs: torch.Tensor, inputs: torch.Tensor, rows: StepRows) -> None:
        """Add to the outputs (num_rows, out_features), in place, in any dtype."""


class AdapterStep:
    """The adapters of the step that is being computed; layers look here, because a call has no room for them."""

    def __init__(self, device: torch.device) -> None:
        """Begin outside of steps."""
        self._device = device
        self._slots: Ints | None = None
        self._by_count: dict[int, StepRows] = {}

    @property
    def is_on(self) -> bool:
        """Whether any row of the step has an adapter."""
        return self._slots is not None

    @contextmanager
    def of(self, batch: Batch) -> Iterator[None]:
        """Compute the batch in here."""
        if batch.adapters is not None:
            self._slots = np.repeat(batch.adapters, np.diff(batch.query_start_locs))
            self._slots = np.pad(self._slots, (0, batch.num_tokens - len(self._slots)))
            self._by_count = {batch.num_tokens: StepRows(self._slots, self._device)}
            self.keep(batch.row_indices)
        try:
            yield
        finally:
            self._slots, self._by_count = None, {}

    def keep(self, indices: Ints, *, replaces: bool = False) -> None:
        """From now on layers also get these tokens alone.

        Layers know rows by their number: a step has all tokens or the sampled ones, and these are all if as many.

        Args:
            replaces: Whether they get nothing else.
        """
        if self._slots is not None and (replaces or len(indices) not in self._by_count):
            self._by_count[len(indices)] = StepRows(self._slots[indices], self._device)

    def rows(self, num_rows: int) -> StepRows | None:
        """So many rows that a layer got; None if none of them has an adapter."""
        if self._slots is None or not num_rows:
            return None
        rows = self._by_count[num_rows]
        return rows if rows.groups else None

    def add(self, site: Site, outputs: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add what the adapters of the rows make of the inputs, if there are any."""
        if rows := self.rows(inputs.size(0)):
            site.add(outputs, inputs, rows)
