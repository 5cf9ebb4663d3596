"""Layers of a model with what adapters add, the sites where they add it, and which rows of a step use which adapter.

In a step without adapters they are the layers that they hold.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.batch import Batch, Ints
from weft.engine.device import to_device
from weft.engine.families.experts import Gating
from weft.engine.layers.block import Block, BlockStep, Layer, Linear, run_blocks
from weft.engine.layers.feed_forward import Activated, Experts, join
from weft.engine.lora.targets import _ROWS_AT_ONCE


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


class AdaptedLinear(Linear):
    """A matrix with its site."""

    def __init__(self, inner: Linear, site: Site, step: AdapterStep) -> None:
        """Take the matrix without adapters."""
        self.inner, self.site, self.step = inner, site, step

    @override
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.inner(inputs)
        self.step.add(self.site, outputs, inputs)
        return outputs

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        self.inner.add_to(residual, inputs)
        self.step.add(self.site, residual, inputs)

    @override
    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.inner.to_float32(inputs)
        self.step.add(self.site, outputs, inputs)
        return outputs


class AdaptedActivation:
    """The first half of a feed-forward layer, with the site of its matrix."""

    def __init__(self, inner: Activated, site: Site, step: AdapterStep) -> None:
        """Take the layer without adapters."""
        self.inner, self.site, self.step = inner, site, step

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> (num_tokens, intermediate_size)."""
        if not self.step.is_on:
            return self.inner(inputs)
        sums = self.inner.sums(inputs)
        self.step.add(self.site, sums, inputs)
        return self.inner.activate(sums)


class SeparableExperts(Experts, Protocol):
    """Experts whose matrices can be used one by one."""

    gating: Gating

    def first(self, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        """What gate and up projection make, gate first, in the dtype of the inputs or float32."""

    def second(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        """What the down projection makes."""


class AdaptedExperts(Experts):
    """Experts with the sites of their matrices, one for each expert.

    Tokens without an adapter go through the experts as they are. The others go expert by expert, since what an adapter
    adds comes before the activation. This is slow, and waits for the device.
    """

    def __init__(
        self, inner: SeparableExperts, first_sites: Sequence[Site], second_sites: Sequence[Site], step: AdapterStep
    ) -> None:
        """Take the experts without adapters."""
        self.inner, self._first_sites, self._second_sites, self._step = inner, first_sites, second_sites, step

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> None:
        rows = self._step.rows(inputs.size(0))
        if rows is None:
            self.inner.add_to(residual, inputs, ids, shares)
            return
        order = torch.from_numpy(rows.order).to(inputs.device)
        adapted, plain = order.tensor_split((rows.groups[-1][2],))
        if len(plain):
            sums = residual[plain]
            self.inner.add_to(sums, inputs[plain], ids[plain], shares[plain])
            residual[plain] = sums
        chosen, totals = ids[adapted], torch.zeros(len(adapted), residual.size(1), device=inputs.device)
        for expert in chosen.flatten().bincount().nonzero().flatten().tolist():
            places, ranks = torch.where(chosen == expert)
            outputs = self._compute(expert, inputs[adapted[places]], rows.slots[rows.order[places.cpu().numpy()]])
            totals.index_add_(0, places, outputs * shares[adapted[places], ranks].unsqueeze(1))
        residual[adapted] = (residual[adapted] + totals).to(residual.dtype)

    def _compute(self, expert: int, inputs: torch.Tensor, slots: Ints) -> torch.Tensor:
        """The outputs of an expert for some tokens, in float32."""
        rows = StepRows(slots, inputs.device)
        sums = self.inner.first(expert, inputs)
        self._first_sites[expert].add(sums, inputs, rows)
        inner = join(self.inner.gating, sums).to(inputs.dtype)
        outputs = self.inner.second(expert, inner).float()
        self._second_sites[expert].add(outputs, inner, rows)
        return outputs


class AdaptedEmbedding:
    """An embedding: the columns of a that belong to the ids take the place of its inputs."""

    def __init__(self, inner: Layer, site: Site, step: AdapterStep) -> None:
        """Take the layer without adapters."""
        self.inner, self.site, self.step = inner, site, step

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids (num_tokens,) -> (num_tokens, hidden_size)."""
        outputs = self.inner(ids)
        self.step.add(self.site, outputs, ids)
        return outputs


class EmbeddingSite(Site):
    """Looks up a row of rank values for each id, then expands it by the site of a matrix of as many inputs."""

    def __init__(self, expander: Site, max_rank: int, num_reserved_bytes: int) -> None:
        """The expander takes (num_rows, max_rank)."""
        self.num_reserved_bytes = num_reserved_bytes
        self._expander, self._max_rank = expander, max_rank
        self._tables: dict[int, torch.Tensor] = {}

    @override
    def put(self, slot: int, deltas: Sequence[Delta]) -> None:
        self._tables.pop(slot, None)
        for _, a, _ in deltas:
            self._tables[slot] = a.T.contiguous()  # (num_ids, rank)
        eyes = [torch.eye(len(d.a), self._max_rank, dtype=d.b.dtype, device=d.b.device) for d in deltas]
        self._expander.put(slot, [Delta(d.first, eye, d.b) for d, eye in zip(deltas, eyes, strict=True)])

    @override
    def add(self, outputs: torch.Tensor, inputs: torch.Tensor, rows: StepRows) -> None:
        if not self._tables:
            return
        looked_up = outputs.new_zeros(len(outputs), self._max_rank)
        for slot, places in rows.by_slot:
            if slot in self._tables:
                table = self._tables[slot]
                looked_up[places, : table.size(1)] = table[inputs[places]]
        self._expander.add(outputs, looked_up, rows)


class AdaptedBlocks(Block):
    """Blocks in two forms over the same weights: as `LayerKernels` fuses them, and with adapters if a step has some."""

    def __init__(self, plain: Sequence[Block], adapted: Sequence[Block], step: AdapterStep) -> None:
        """Take both forms."""
        self._plain, self._adapted, self._step = plain, adapted, step

    @override
    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        return run_blocks(self._adapted if self._step.is_on else self._plain, hidden, step)


_T = TypeVar("_T")


def without_adapters(part: _T) -> _T:
    """The part of a model with the layers that adapted ones hold in place of these, as far as parts are dataclasses."""
    found: object = part
    if isinstance(part, AdaptedLinear | AdaptedActivation | AdaptedEmbedding | AdaptedExperts):
        found = part.inner
    elif isinstance(part, tuple):
        found = tuple(map(without_adapters, part))
    elif is_dataclass(part) and not isinstance(part, type):
        values = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
        inner = {name: without_adapters(value) for name, value in values.items()}
        if any(inner[name] is not value for name, value in values.items()):
            found = replace(part, **inner)
    return found  # type: ignore[return-value]


MakeHead = Callable[[torch.Tensor], Layer]
"""Makes a head of a weight (num_ids, hidden_size), in a thread beside the steps: hidden states -> float32 logits."""


class SavedLimits(NamedTuple):
    """The slots that have room for whole matrices, from 1 on, and what makes heads of them."""

    num_slots: int
    make_head: MakeHead


class SavedSite(Site):
    """The site of a matrix that adapters may have a whole one for.

    What the model's own matrix makes of the rows of such an adapter is replaced. Rows of other adapters keep their
    bits.
    """

    def __init__(self, inner: Site, make: Callable[[torch.Tensor], Layer], num_bytes: int) -> None:
        """Begin without adapters; num_bytes: what whole matrices in all slots that may have one will take."""
        self.num_reserved_bytes = inner.num_reserved_bytes + num_bytes
        self._inner, self._make = inner, make
        self._layers: dict[int, Layer] = {}

    @override
    def put(self, slot: int, deltas: Sequence[Delta]) -> None:
        self._layers.pop(slot, None)  # before the next one comes: there is no room for both
        self._inner.put(slot, deltas)

    def save(self, slot: int, weight: torch.Tensor) -> None:
        """Have a matrix of this weight in place of the model's, after `put`."""
        self._layers[slot] = self._make(weight)

    @override
    def add(self, outputs: torch.Tensor, inputs: torch.Tensor, rows: StepRows) -> None:
        for slot, places in rows.by_slot:
            if layer := self._layers.get(slot):
                for some in torch.split(places, _ROWS_AT_ONCE):
                    outputs[some] = layer(inputs[some]).to(outputs.dtype)
        self._inner.add(outputs, inputs, rows)


def table(weight: torch.Tensor) -> Layer:
    """An embedding of a weight (num_ids, hidden_size)."""
    return partial(F.embedding, weight=weight)
