"""Readers, which turn weight references into tensors on the device; each checkpoint format has its own.

`engine/models/loading.py` picks the reader of a checkpoint; `engine/models/families/registry.py` refuses formats that
have none.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from typing_extensions import override

from weft.engine.weights.refs import ExpertsRef, RowOrder, Share, TensorRef, WeightRef

# Called with the bytes loaded so far and the bytes in total, counted as they are on the device.
Progress = Callable[[int, int], None]


class Part(NamedTuple):
    """What is wanted of a stored tensor: its shape, and an index into it."""

    shape: tuple[int, ...]
    where: tuple[torch.Tensor | slice, ...]


class WeightReader(Protocol):
    """Reads what a model refers to. A format with packed weights adds a method that returns them packed."""

    def dense(self, ref: WeightRef) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight (out_features, in_features) and bias (out_features,), None without one; the caller owns both.

        Raises:
            ModelError: The checkpoint has no such tensor of this shape.
        """

    def experts(self, ref: ExpertsRef) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Weight and bias of one expert after another, each as from `dense`."""

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """The values with the offset added; raises as `dense` does."""


class TensorSource(Protocol):
    """A place that plain tensors come from."""

    def fill(
        self, name: str, target: torch.Tensor, item: tuple[int, int] | None = None, part: Part | None = None
    ) -> None:
        """Copy the tensor into target; raises ModelError if it does not exist or has another shape.

        Item is for a tensor of several that have the shape of target: the index of one, and how many there are. A part
        is all that is read, and has the shape of target in place of the tensor.
        """

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor that may have another name; None if it does not exist, or has any shape."""

    def close(self) -> None:
        """End loading; raises ModelError if the source has tensors that nobody asked for."""


class DenseReader(WeightReader):
    """Reads checkpoints of plain tensors, each projection straight to its place in a stacked matrix."""

    def __init__(
        self,
        source: TensorSource,
        device: torch.device,
        dtype: torch.dtype,
        total_bytes: int,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Read into tensors of dtype on the device; progress is called after every tensor."""
        self._source = source
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._done_bytes, self._total_bytes = 0, total_bytes

    @override
    def dense(self, ref: WeightRef) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._matrix(ref, ref.names, (".weight", ".bias"))

    @override
    def experts(self, ref: ExpertsRef) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        shape = self._source.shape(ref.fused) if ref.fused else None
        if shape is not None:
            # Some have (inputs, outputs); matrices that are as wide as high are taken as they are.
            whole = ref.matrix.share or ref.matrix
            is_transposed = shape[1:] != (sum(whole.sizes), whole.in_features)
            matrix = replace(ref.matrix, names=(ref.fused,), is_transposed=is_transposed)
            ref = ExpertsRef(matrix, ref.num_experts, ("", "_bias"))
        is_stacked = not any("{}" in name for name in ref.matrix.names)
        for index in range(ref.num_experts):
            names = tuple(name.format(index) for name in ref.matrix.names)
            yield self._matrix(ref.matrix, names, ref.suffixes, (index, ref.num_experts) if is_stacked else None)

    def _matrix(
        self, ref: WeightRef, names: tuple[str, ...], suffixes: tuple[str, str], item: tuple[int, int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = self._empty(ref.out_features, ref.in_features)
        bias = self._empty(ref.out_features) if ref.has_bias else None
        if ref.share is not None:
            self._read_share(ref, ref.share, weight, bias, names, suffixes, item)
            return self._scaled(weight, ref), None if bias is None else self._scaled(bias, ref)
        sizes = ref.sizes if len(names) > 1 else (ref.out_features,)
        start = 0
        for name, size in zip(names, sizes, strict=True):
            rows = weight[start : start + size]
            if ref.is_transposed:
                stored = self._empty(ref.in_features, size)
                self._fill(name + suffixes[0], stored, item)
                rows.copy_(stored.T)
            else:
                self._fill(name + suffixes[0], rows, item)
            if bias is not None:
                self._fill(name + suffixes[1], bias[start : start + size], item)
            start += size
        return self._finished(weight, ref), None if bias is None else self._finished(bias, ref)

    def _read_share(
        self,
        ref: WeightRef,
        share: Share,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        names: tuple[str, ...],
        suffixes: tuple[str, str],
        item: tuple[int, int] | None,
    ) -> None:
        """Fill a rank's part; a projection that lies in one tensor with others is found by its rows there."""
        rows, start = ref.stored_rows(share), 0
        columns = slice(share.first_input, share.first_input + ref.in_features)
        for name, size in zip(names, share.sizes if len(names) > 1 else (sum(share.sizes),), strict=True):
            (places,) = torch.where((rows >= start) & (rows < start + size))
            picked = rows[places] - start
            if ref.is_transposed:
                stored = self._empty(ref.in_features, len(picked))
                self._fill(name + suffixes[0], stored, item, Part((share.in_features, size), (columns, picked)))
                stored = stored.T
            else:
                stored = self._empty(len(picked), ref.in_features)
                self._fill(name + suffixes[0], stored, item, Part((size, share.in_features), (picked, columns)))
            places = places.to(self._device)
            weight[places] = stored
            if bias is not None:
                stored = self._empty(len(picked))
                self._fill(name + suffixes[1], stored, item, Part((size,), (picked,)))
                bias[places] = stored
            start += size

    @override
    def tensor(self, ref: TensorRef) -> torch.Tensor:
        shape = ref.shape if ref.whole is None else (ref.whole, *ref.shape[1:])
        values = torch.empty(shape, dtype=ref.dtype or self._dtype, device=self._device)
        self._fill(ref.name, values)
        values = self._ordered(values.view(-1), ref.order).view(shape)
        if ref.runs:
            values = torch.cat([values[first : first + size] for first, size in ref.runs])
        return values.float() + ref.offset if ref.offset else values

    def _finished(self, rows: torch.Tensor, ref: WeightRef) -> torch.Tensor:
        return self._scaled(self._ordered(rows, ref.order), ref)

    def _scaled(self, rows: torch.Tensor, ref: WeightRef) -> torch.Tensor:
        if ref.scales:
            for part, factor in zip(rows.split_with_sizes(ref.sizes), ref.scales, strict=True):
                part.mul_(factor)
        return rows

    def _ordered(self, rows: torch.Tensor, order: RowOrder | None) -> torch.Tensor:
        return rows if order is None else rows[order.indices(len(rows)).to(self._device)]

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _fill(
        self, name: str, target: torch.Tensor, item: tuple[int, int] | None = None, part: Part | None = None
    ) -> None:
        self._source.fill(name, target, item, part)
        self._done_bytes += target.nbytes
        self._progress(self._done_bytes, self._total_bytes)
