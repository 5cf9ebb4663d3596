"""References to the weights of a model, and the reader that turns them into tensors on the device.

A reference names weights of a checkpoint and their shapes. It does not say how the checkpoint stores them, which the
reader knows, nor how they are kept in memory, which `LayerKernels` decides. The reader reads from a `TensorSource`:
`engine/weights/tensor_files.py` has those of plain tensors, `engine/models/loading.py` has that of quantized ones and
picks the source of a checkpoint.
"""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from weft.engine.weights.groups import Groups, stacked


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Where a checkpoint has the rows of a matrix, or the values of a vector, that a model wants in another order.

    The checkpoint has num_groups groups, and in each of them the parts one after another. The model wants the first
    part of all groups, then the rows behind the groups, then the second part of all groups, and so on. Then rows within
    heads are put in order.

    Attributes:
        num_groups: Such as the heads of a fused projection; 1 if all is in place.
        parts: Rows of each part of a group; empty for one part.
        head: For each row of a head, the place that it has in the checkpoint; empty if heads are in order.
        num_heads: Heads at the beginning that `head` is for.
    """

    num_groups: int = 1
    parts: tuple[int, ...] = ()
    head: tuple[int, ...] = ()
    num_heads: int = 0

    def indices(self, num_rows: int) -> Tensor:
        """(num_rows,) int64: for each row of the model, the row of the checkpoint."""
        rows = torch.arange(num_rows)
        if self.parts:
            grouped, others = rows.tensor_split((self.num_groups * sum(self.parts),))
            parts = torch.split(grouped.view(self.num_groups, sum(self.parts)), list(self.parts), 1)
            first, *more = (part.flatten() for part in parts)
            rows = torch.cat((first, others, *more))
        if self.head:
            num_ordered = self.num_heads * len(self.head)
            heads = rows[:num_ordered].view(self.num_heads, len(self.head))
            rows = torch.cat((heads[:, torch.tensor(self.head)].flatten(), rows[num_ordered:]))
        return rows


class Run(NamedTuple):
    """Neighbouring rows, from the first on."""

    first: int
    size: int


@dataclass(frozen=True, slots=True)
class Share:
    """Where a rank's part of a matrix lies in the whole, which the checkpoint has.

    Attributes:
        sizes: Outputs of each projection of the whole.
        runs: Outputs of the part, among those of the whole in the model's order.
        in_features: Inputs of the whole.
        first_input: The first input of the part.
    """

    sizes: tuple[int, ...]
    runs: tuple[Run, ...]
    in_features: int
    first_input: int = 0


@dataclass(frozen=True, slots=True)
class WeightRef:
    """A matrix: one projection, or several that share their input, stacked along the outputs.

    Attributes:
        names: Names of the projections in the checkpoint, without `.weight` and `.bias`; one if it has them stacked.
        sizes: Outputs of each projection.
        in_features: Inputs, the same for all.
        has_bias: Whether each projection has a bias.
        biasless: Names of those that have none all the same.
        order: Where the checkpoint has the rows of the stacked matrix, the whole one; None if they are in order.
        is_transposed: Whether the checkpoint has (in_features, out_features).
        scales: Factors on the outputs of each projection, folded into weights and biases; empty for 1.
        share: Of which whole matrix this is a part; None if it is a whole one.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    in_features: int
    has_bias: bool = False
    order: RowOrder | None = None
    is_transposed: bool = False
    scales: tuple[float, ...] = ()
    share: Share | None = None
    biasless: tuple[str, ...] = ()

    @property
    def out_features(self) -> int:
        """Outputs of all projections."""
        return sum(self.sizes)

    @property
    def num_values(self) -> int:
        """Values in the checkpoint."""
        return self.out_features * (self.in_features + self.has_bias)

    @property
    def is_cut(self) -> bool:
        """Whether its inputs are some of those of a whole matrix."""
        return self.share is not None and self.share.in_features != self.in_features

    def stored_rows(self, share: Share) -> Tensor:
        """(out_features,) int64: for each output of a part, its row in the checkpoint's stacked matrix."""
        rows = torch.cat([torch.arange(first, first + size) for first, size in share.runs])
        return rows if self.order is None else self.order.indices(sum(share.sizes))[rows]


@dataclass(frozen=True, slots=True)
class ExpertsRef:
    """A matrix of each expert of a layer.

    Attributes:
        matrix: That of one expert. In its names `{}` stands for the expert's number. Without it a tensor of the
            checkpoint holds all experts, along its first dimension.
        suffixes: What follows a name in the name of a weight and in that of a bias.
        fused: A tensor that holds all experts in newer checkpoints, gate before up; "" if there is none.
    """

    matrix: WeightRef
    num_experts: int
    suffixes: tuple[str, str] = (".weight", ".bias")
    fused: str = ""

    @property
    def num_values(self) -> int:
        """Values in the checkpoint."""
        return self.num_experts * self.matrix.num_values


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A small tensor that no product reads as a matrix, such as the weights of a norm.

    Attributes:
        name: Full name in the checkpoint.
        offset: Added to the stored values, which are then kept in float32: 16-bit types are less precise near 1.
        dtype: Dtype in memory; None for the model's.
        order: Where the checkpoint has the values, flattened, of the whole tensor; None if they are in order.
        whole: Length in the checkpoint, if this is a part along the first dimension, namely the rows of the runs.
    """

    name: str
    shape: tuple[int, ...]
    offset: float = 0.0
    dtype: torch.dtype | None = None
    order: RowOrder | None = None
    whole: int | None = None
    runs: tuple[Run, ...] = ()

    @property
    def num_values(self) -> int:
        """Values in the checkpoint."""
        return prod(self.shape)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes in memory for a model of this dtype."""
        return self.num_values * (torch.float32 if self.offset else self.dtype or dtype).itemsize


Progress = Callable[[int, int], None]
"""Called with the bytes loaded so far and the bytes in total, counted as they are on the device."""


class Part(NamedTuple):
    """What is wanted of a stored tensor: its shape, and an index into it."""

    shape: tuple[int, ...]
    where: tuple[Tensor | slice, ...]


class WeightReader(Protocol):
    """Reads what a model refers to."""

    def dense(self, ref: WeightRef) -> tuple[Tensor, Tensor | None]:
        """Weight (out_features, in_features) and bias (out_features,), None without one; the caller owns both.

        Raises:
            ModelError: The checkpoint has no such tensor of this shape.
        """

    def groups(self, ref: WeightRef) -> Groups | None:
        """The weight as the checkpoint has it quantized, for `LayerKernels` that keep it so; its bias is `bias_of`.

        None if it is not quantized, if its projections are not quantized alike, or if the reference scales it.
        Dequantized it is the weight of `dense`, bit for bit.
        """
        return None

    def bias_of(self, ref: WeightRef) -> Tensor | None:
        """The bias of `dense` alone."""
        return self.dense(ref)[1]

    def experts(self, ref: ExpertsRef) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Weight and bias of one expert after another, each as from `dense`."""

    def expert_groups(self, ref: ExpertsRef) -> Iterator[tuple[Groups | None, Tensor | None]]:
        """Weight, as from `groups`, and bias of one expert after another."""
        return ((None, bias) for _, bias in self.experts(ref))

    def tensor(self, ref: TensorRef) -> Tensor:
        """The values with the offset added; raises as `dense` does."""

    def on_host(self) -> "WeightReader":
        """Reads the same straight into host memory; itself if it reads there already."""
        return self


class TensorSource(Protocol):
    """A place that plain tensors come from."""

    def fill(self, name: str, target: Tensor, item: tuple[int, int] | None = None, part: Part | None = None) -> None:
        """Copy the tensor into target; raises ModelError if it does not exist or has another shape.

        Item is for a tensor of several that have the shape of target: the index of one, and how many there are. A part
        is all that is read, and has the shape of target in place of the tensor.
        """

    def groups(self, name: str, shape: tuple[int, int], item: tuple[int, int] | None = None) -> Groups | None:
        """A quantized matrix of this shape (out_features, in_features); None if it is not quantized, or missing."""
        return None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor that may have another name; None if it does not exist, or has any shape."""

    def on_host(self) -> "TensorSource":
        """The same tensors for targets in host memory; itself if it makes no difference."""
        return self

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
        self._source, self._device, self._dtype = source, device, dtype
        self._count = _counter(total_bytes, progress)

    @override
    def on_host(self) -> "DenseReader":
        if self._device.type == "cpu":
            return self
        host = copy(self)  # which counts with this one
        host._source, host._device = self._source.on_host(), torch.device("cpu")
        return host

    @override
    def dense(self, ref: WeightRef) -> tuple[Tensor, Tensor | None]:
        return self._matrix(ref, ref.names, (".weight", ".bias"))

    @override
    def experts(self, ref: ExpertsRef) -> Iterator[tuple[Tensor, Tensor | None]]:
        return (self._matrix(*expert) for expert in self._experts(ref))

    @override
    def groups(self, ref: WeightRef) -> Groups | None:
        return self._groups(ref, ref.names, ".weight", None)

    @override
    def bias_of(self, ref: WeightRef) -> Tensor | None:
        return self._bias(ref, ref.names, ".bias", None)

    @override
    def expert_groups(self, ref: ExpertsRef) -> Iterator[tuple[Groups | None, Tensor | None]]:
        for matrix, names, suffixes, item in self._experts(ref):
            yield self._groups(matrix, names, suffixes[0], item), self._bias(matrix, names, suffixes[1], item)

    def _experts(
        self, ref: ExpertsRef
    ) -> Iterator[tuple[WeightRef, tuple[str, ...], tuple[str, str], tuple[int, int] | None]]:
        """Of each expert its matrix, the names of tensors and the endings of these, and which item of them it is."""
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
            yield ref.matrix, names, ref.suffixes, (index, ref.num_experts) if is_stacked else None

    def _groups(
        self, ref: WeightRef, names: tuple[str, ...], suffix: str, item: tuple[int, int] | None
    ) -> Groups | None:
        whole = ref.share or ref
        parts: list[Groups] = []
        for name, size in zip(names, whole.sizes if len(names) > 1 else (sum(whole.sizes),), strict=True):
            part = None if ref.scales else self._source.groups(name + suffix, (size, whole.in_features), item)
            if part is None:
                return None
            parts.append(part)
        groups = stacked(parts)
        if groups is None:
            return None
        if ref.share is not None:
            rows, first = ref.stored_rows(ref.share), ref.share.first_input
            groups = groups.part(rows.to(self._device), slice(first, first + ref.in_features))
        elif ref.order is not None:
            groups = groups.part(ref.order.indices(ref.out_features).to(self._device))
        self._count(ref.out_features * ref.in_features * self._dtype.itemsize)
        return groups

    def _matrix(
        self, ref: WeightRef, names: tuple[str, ...], suffixes: tuple[str, str], item: tuple[int, int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        weight = self._empty(ref.out_features, ref.in_features)
        columns = slice(ref.share.first_input, ref.share.first_input + ref.in_features) if ref.share else slice(None)
        for name, places, picked, size in self._projections(ref, names):
            target = weight[places] if isinstance(places, slice) else self._empty(len(places), ref.in_features)
            part = Part((size, ref.share.in_features), (picked, columns)) if ref.share else None
            self._fill_matrix(name + suffixes[0], target, ref.is_transposed, item, part)
            if not isinstance(places, slice):
                weight[places] = target
        return self._finished(weight, ref), self._bias(ref, names, suffixes[1], item)

    def _bias(self, ref: WeightRef, names: tuple[str, ...], suffix: str, item: tuple[int, int] | None) -> Tensor | None:
        if not ref.has_bias:
            return None
        bias = self._empty(ref.out_features)
        for name, places, picked, size in self._projections(ref, names):
            target = bias[places] if isinstance(places, slice) else self._empty(len(places))
            if name in ref.biasless:
                target.zero_()
            else:
                self._fill(name + suffix, target, item, Part((size,), (picked,)) if ref.share else None)
            if not isinstance(places, slice):
                bias[places] = target
        return self._finished(bias, ref)

    def _projections(
        self, ref: WeightRef, names: tuple[str, ...]
    ) -> Iterator[tuple[str, slice | Tensor, Tensor | slice, int]]:
        """Of each tensor its name, the rows that it has of the matrix, which of its own they are, and how many it has.

        A rank's part of a projection that lies in one tensor with others is found by its rows there.
        """
        rows = ref.stored_rows(ref.share) if ref.share else None
        whole, start = ref.share or ref, 0
        for name, size in zip(names, whole.sizes if len(names) > 1 else (sum(whole.sizes),), strict=True):
            if rows is None:
                yield name, slice(start, start + size), slice(None), size
            else:
                (places,) = torch.where((rows >= start) & (rows < start + size))
                yield name, places.to(self._device), rows[places] - start, size
            start += size

    def _fill_matrix(
        self, name: str, target: Tensor, is_transposed: bool, item: tuple[int, int] | None, part: Part | None
    ) -> None:
        """Fill (outputs, inputs) of a tensor, or of a part of it; the decoders know how they lie in theirs."""
        outputs, inputs = part.shape if part else target.shape
        groups = self._source.groups(name, (outputs, inputs), item)
        if groups is not None:
            if part:
                rows, columns = part.where
                assert isinstance(rows, Tensor) and isinstance(columns, slice)
                groups = groups.part(rows.to(self._device), columns)
            target.copy_(groups.dequantize(self._dtype))
            self._count(target.nbytes)
        elif is_transposed:
            stored = self._empty(*target.shape[::-1])
            self._fill(name, stored, item, part and Part(part.shape[::-1], part.where[::-1]))
            target.copy_(stored.T)
        else:
            self._fill(name, target, item, part)

    @override
    def tensor(self, ref: TensorRef) -> Tensor:
        shape = ref.shape if ref.whole is None else (ref.whole, *ref.shape[1:])
        values = torch.empty(shape, dtype=ref.dtype or self._dtype, device=self._device)
        self._fill(ref.name, values)
        values = self._ordered(values.view(-1), ref.order).view(shape)
        if ref.runs:
            values = torch.cat([values[first : first + size] for first, size in ref.runs])
        return values.float() + ref.offset if ref.offset else values

    def _finished(self, rows: Tensor, ref: WeightRef) -> Tensor:
        """Rows in order, which those of a part are already, and scaled."""
        rows = rows if ref.share else self._ordered(rows, ref.order)
        if ref.scales:
            for part, factor in zip(rows.split_with_sizes(ref.sizes), ref.scales, strict=True):
                part.mul_(factor)
        return rows

    def _ordered(self, rows: Tensor, order: RowOrder | None) -> Tensor:
        return rows if order is None else rows[order.indices(len(rows)).to(self._device)]

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _fill(self, name: str, target: Tensor, item: tuple[int, int] | None = None, part: Part | None = None) -> None:
        self._source.fill(name, target, item, part)
        self._count(target.nbytes)


def _counter(total_bytes: int, progress: Progress) -> Callable[[int], None]:
    """Adds up what was read, and tells."""
    done_bytes = 0

    def count(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress(done_bytes, total_bytes)

    return count
