"""Layers of a model with what adapters add; in a step without adapters they are the layers that they hold."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from typing_extensions import override

from weft.engine.layers.block import Block, BlockStep, run_blocks
from weft.engine.layers.gated import Activated
from weft.engine.layers.parts import Layer, Linear
from weft.engine.lora.adapted_experts import AdaptedExperts
from weft.engine.lora.step_rows import AdapterStep, Delta, Site, StepRows

_T = TypeVar("_T")


class AdaptedLinear(Linear):
    """A matrix."""

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
    """The first half of a feed-forward layer."""

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
    """Blocks in two forms over the same weights: as a kit fuses them, and with adapters, for steps that have some."""

    def __init__(self, plain: Sequence[Block], adapted: Sequence[Block], step: AdapterStep) -> None:
        """Take both forms."""
        self._plain, self._adapted, self._step = plain, adapted, step

    @override
    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        return run_blocks(self._adapted if self._step.is_on else self._plain, hidden, step)


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
