"""Layers for CUDA whose matrix products are Triton kernels of Weft: packed matrices, experts, and low-rank adapters.

Nothing in experts and adapters waits for the device. All shapes in a layer of experts follow from those of its inputs,
so that a CUDA graph can hold it.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import triton
from torch import Tensor
from typing_extensions import override

from weft.engine.device import to_device
from weft.engine.families.experts import Gating
from weft.engine.kernels.triton import products_jit as kernels
from weft.engine.kernels.triton.layers import OWN_ACTIVATIONS, GatedActivation
from weft.engine.kernels.triton.packed import MANY_ROWS, PackedMatrix
from weft.engine.layers.block import Linear
from weft.engine.layers.feed_forward import Experts, join
from weft.engine.lora.adapted_layers import Delta, Site, StepRows

_MOST_ROWS = 256
_PART_BYTES = 64 << 20
_PART_ROWS = 64
"""Rows of a part are a multiple, since cuBLAS is slow with outputs that begin between multiples of 16 bytes."""


class PackedLinear(Linear):
    """A matrix that stays packed, with its bias.

    For up to _MOST_ROWS rows a product reads the packed matrix, in 64 rows at a time. Beyond, it would unpack each
    weight once more for every 64 rows and run below the speed of cuBLAS. Unpacking a part of the matrix once moves 4.5
    bytes a weight at 4 bits, which takes as long as about 250 rows of arithmetic; then cuBLAS has the rest. Parts are
    small, so that they take little memory.
    """

    def __init__(self, matrix: PackedMatrix, bias: Tensor | None, *, is_deterministic: bool = False) -> None:
        """Take both; is_deterministic: a row's bits do not depend on how many rows there are."""
        self.matrix, self.bias = matrix, bias
        self._is_deterministic = is_deterministic

    @override
    def __call__(self, inputs: Tensor) -> Tensor:
        return self._multiply(inputs, inputs.dtype) if self._is_packed(inputs) else self._many(inputs)

    @override
    def add_to(self, residual: Tensor, inputs: Tensor) -> None:
        if self._is_packed(inputs):
            self.matrix.multiply(inputs, self.bias, residual, adds=True, is_deterministic=self._is_deterministic)
        else:
            residual += self._many(inputs)

    @override
    def to_float32(self, inputs: Tensor) -> Tensor:
        return self._multiply(inputs, torch.float32)  # however many rows: those of `_many` are rounded

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the matrix, as an embedding."""
        return self.matrix.unpack(dtype, ids=ids)

    def _multiply(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        outputs = inputs.new_empty(len(inputs), self.matrix.out_features, dtype=dtype)
        return self.matrix.multiply(inputs, self.bias, outputs, is_deterministic=self._is_deterministic)

    def _is_packed(self, inputs: Tensor) -> bool:
        return self._is_deterministic or len(inputs) <= _MOST_ROWS

    def _many(self, inputs: Tensor) -> Tensor:
        matrix = self.matrix
        outputs = inputs.new_empty(len(inputs), matrix.out_features)
        size = max(_PART_BYTES // (inputs.itemsize * matrix.in_features) // _PART_ROWS, 1) * _PART_ROWS
        for first in range(0, matrix.out_features, size):
            part = matrix.unpack(inputs.dtype, first=first, num_rows=min(size, matrix.out_features - first))
            torch.mm(inputs, part.t(), out=outputs[:, first : first + size])
        return outputs if self.bias is None else outputs.add_(self.bias)


_GROUP = 128
"""Inputs with a scale of their own in an fp8 product."""


class Fp8Linear(PackedLinear):
    """A matrix in e4m3 that many rows multiply in fp8; ask `supports` first, and the GPU has to have fp8.

    It is for checkpoints that were made for activations in fp8. Torch's product is for scales of outputs, Weft's for
    scales of groups. Each row of the inputs, or group of a row, gets a scale of its own. Few rows stay in 16 bits,
    since reading the weights takes as long in both.
    """

    def __init__(self, matrix: PackedMatrix, bias: Tensor | None) -> None:
        """Take both; scales of outputs become float32 once more."""
        super().__init__(matrix, bias)
        self._transposed = matrix.codes.view(torch.float8_e4m3fn).t()
        self._scales = (matrix.scales.float() * matrix.factors[:, None]).t().contiguous()

    @staticmethod
    def supports(matrix: PackedMatrix) -> bool:
        """Whether the products take this matrix."""
        is_right = matrix.form.kind == "fp8" and matrix.form.group in (None, _GROUP)
        is_aligned = matrix.in_features % (matrix.form.group or 16) == 0 and matrix.out_features % 16 == 0
        return is_right and is_aligned

    @override
    def _is_packed(self, inputs: Tensor) -> bool:
        return len(inputs) <= MANY_ROWS

    @override
    def _many(self, inputs: Tensor) -> Tensor:
        rounded, scales = round_rows(inputs, self.matrix.form.group)
        if self.matrix.form.group is None:
            outputs: Tensor = torch._scaled_mm(
                rounded, self._transposed, scale_a=scales, scale_b=self._scales, out_dtype=inputs.dtype
            )
            return outputs if self.bias is None else outputs.add_(self.bias)
        outputs = inputs.new_empty(len(inputs), self.matrix.out_features)
        grid = triton.cdiv(outputs.size(0), 64), triton.cdiv(outputs.size(1), 128)
        kernels.multiply_fp8[grid](
            *(rounded, scales, self._transposed, self._scales, outputs if self.bias is None else self.bias, outputs),
            *(*outputs.shape, self.matrix.in_features),
            HAS_BIAS=self.bias is not None,
            ROWS=64,
            OUTS=128,
            GROUP=_GROUP,
            num_warps=8,
            num_stages=4,
        )
        return outputs


def round_rows(inputs: Tensor, group: int | None) -> tuple[Tensor, Tensor]:
    """Inputs (num_rows, size) in e4m3, and scales (num_rows, number of groups) in float32."""
    num_rows, size = inputs.shape
    rounded = torch.empty(num_rows, size, dtype=torch.float8_e4m3fn, device=inputs.device)
    block = triton.next_power_of_2(size)
    scales = torch.empty(num_rows, size // group if group else 1, device=inputs.device)
    kernels.round_rows[(num_rows,)](
        *(inputs, rounded, scales, size, scales.size(1), inputs.stride(0)),
        BLOCK=block,
        GROUP=group or block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return rounded, scales


_MIX_BLOCK = 1024


class TritonExperts(Experts):
    """One product for the rows of all experts of a layer, by torch's grouped product or Weft's own.

    Matrices are plain or packed.
    """

    def __init__(
        self,
        gate_up: Tensor | PackedMatrix,
        gate_up_bias: Tensor | None,
        down: Tensor | PackedMatrix,
        down_bias: Tensor | None,
        gating: Gating,
        *,
        is_deterministic: bool,
        is_dependent: bool,
        is_grouped: bool = True,
    ) -> None:
        """See `TorchExperts`.

        Args:
            is_deterministic: A row's bits do not depend on how many rows there are.
            is_grouped: Multiply plain matrices by torch's grouped product where it takes them.
        """
        self.gating = gating
        self._gate_up, self._down = (gate_up, gate_up_bias), (down, down_bias)
        is_own = gating.is_plain and gating.activation in OWN_ACTIVATIONS
        self._activate = GatedActivation(gating.activation, is_dependent) if is_own else partial(join, gating)
        self._is_deterministic, self._is_grouped = is_deterministic, is_grouped and not is_deterministic
        values = gate_up.codes if isinstance(gate_up, PackedMatrix) else gate_up
        self._numbers = torch.arange(len(values), device=values.device)

    @override
    def add_to(self, residual: Tensor, inputs: Tensor, ids: Tensor, shares: Tensor) -> None:
        num_chosen, size = ids.size(1), inputs.size(1)
        experts, pairs = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, self._numbers, right=True, out_int32=True)
        places = pairs.argsort()
        rows = inputs.index_select(0, pairs // num_chosen)
        inner = self._activate(self._multiply(rows, *self._gate_up, experts, ends))
        outputs = self._multiply(inner, *self._down, experts, ends)
        kernels.mix[(len(ids), triton.cdiv(size, _MIX_BLOCK))](
            *(outputs, places, shares.contiguous(), residual, size, residual.stride(0)),
            CHOSEN=num_chosen,
            BLOCK=_MIX_BLOCK,
        )

    def first(self, expert: int, inputs: Tensor) -> Tensor:
        """What gate and up projection of an expert make, gate first."""
        return self._multiply(inputs, *self._gate_up, *self._alone(expert, len(inputs)))

    def second(self, expert: int, inner: Tensor) -> Tensor:
        """What its down projection makes."""
        return self._multiply(inner, *self._down, *self._alone(expert, len(inner)))

    def _alone(self, expert: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """The expert of each row, and where the rows of every expert end, if all are of one."""
        return self._numbers.new_full((num_rows,), expert), (self._numbers >= expert).int() * num_rows

    def _multiply(
        self, rows: Tensor, weight: Tensor | PackedMatrix, bias: Tensor | None, experts: Tensor, ends: Tensor
    ) -> Tensor:
        if isinstance(weight, PackedMatrix):
            packed = rows.new_empty(len(rows), weight.out_features)
            return weight.multiply(rows, bias, packed, ends=ends, is_deterministic=self._is_deterministic)
        if self._is_grouped and supports_grouped(weight):
            outputs: Tensor = torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)
            return outputs if bias is None else outputs.add_(bias.index_select(0, experts))
        return multiply_groups(rows, weight, bias, ends, self._is_deterministic)


def supports_grouped(weight: Tensor) -> bool:
    """Whether torch's grouped product takes weight (num_experts, num_outs, columns)."""
    is_aligned = weight.size(1) % 8 == 0 and weight.size(2) % 8 == 0  # 16 bytes
    return is_aligned and has_grouped(weight.device, weight.dtype)


_GROUPED_MAJORS = 9, 10
"""Of compute capabilities for which torch has a grouped product. For others it waits, and goes expert by expert."""


def has_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a grouped product there."""
    if device.type != "cuda" or dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    return torch.cuda.get_device_capability(device)[0] in _GROUPED_MAJORS


_LARGE_TILE_ROWS = 32
"""Rows of an expert, on average, from which on a program computes 64 of them instead of 16."""


def multiply_groups(rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, is_deterministic: bool) -> Tensor:
    """Weft's grouped product: rows (num_rows, columns) in the order of their experts -> (num_rows, num_outs)."""
    num_experts, num_outs, columns = weight.shape
    block_rows = 64 if is_deterministic or len(rows) >= _LARGE_TILE_ROWS * num_experts else 16
    outputs = rows.new_empty(len(rows), num_outs)
    num_blocks = min(len(rows), len(rows) // block_rows + num_experts)
    kernels.multiply_groups[(num_blocks, triton.cdiv(num_outs, 64))](
        *(rows, weight, rows if bias is None else bias, outputs, ends, num_experts, num_outs, columns),
        HAS_BIAS=bias is not None,
        EXPERTS=triton.next_power_of_2(num_experts),
        ROWS=block_rows,
        OUTS=64,
        BLOCK=64,
        num_warps=4 if block_rows == 16 else 8,  # 4 would keep registers of 64 rows in memory
    )
    return outputs


_ROWS, _OUTS, _RANKS, _LEAST_RANK = 16, 64, 64, 16
"""Rows, outputs and ranks of a tile, and the smallest rank of a matrix unit."""


class TritonSite(Site):
    """The adapters of all slots in one tensor, padded with zeros to the largest rank; allocated at once.

    A matrix takes two launches for the rows of all its adapters.
    """

    num_reserved_bytes = 0

    def __init__(
        self,
        sizes: tuple[int, int],
        num_deltas: int,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Begin without adapters in slots 1 to max_loras.

        Args:
            sizes: Outputs and inputs of the matrix.
            num_deltas: The most deltas of an adapter.
        """
        (num_outs, columns), rank = sizes, max(triton.next_power_of_2(max_rank), _LEAST_RANK)
        self._a = torch.zeros(max_loras, num_deltas, rank, columns, dtype=dtype, device=device)
        self._b = torch.zeros(max_loras, num_outs, rank, dtype=dtype, device=device)
        self._owners = torch.full((max_loras, num_outs), -1, dtype=torch.int32, device=device)
        self._device = device

    @override
    def put(self, slot: int, deltas: Sequence[Delta]) -> None:
        a, b, owners = self._a[slot - 1], self._b[slot - 1], self._owners[slot - 1]
        for tensor, value in ((a, 0), (b, 0), (owners, -1)):
            tensor.fill_(value)
        for index, delta in enumerate(deltas):
            outs, rank = slice(delta.first, delta.first + len(delta.b)), len(delta.a)
            a[index, :rank] = delta.a
            b[outs, :rank] = delta.b
            owners[outs] = index

    @override
    def add(self, outputs: Tensor, inputs: Tensor, rows: StepRows) -> None:
        order, pieces = self._prepare(rows)
        _, num_deltas, rank, columns = self._a.shape
        num_outs = self._b.size(1)
        sums = inputs.new_empty(len(order), num_deltas, rank)
        shape = {"DELTAS": num_deltas, "RANK": rank, "ROWS": _ROWS, "RANKS": min(rank, _RANKS)}
        kernels.shrink[(len(pieces), num_deltas, triton.cdiv(rank, _RANKS))](
            *(inputs, order, pieces, self._a, sums, columns, inputs.stride(0)), **shape, BLOCK=64, num_warps=4
        )
        kernels.expand[(len(pieces), triton.cdiv(num_outs, _OUTS))](
            *(sums, order, pieces, self._b, self._owners, outputs, num_outs, outputs.stride(0)),
            **shape,
            OUTS=_OUTS,
            num_warps=4,
        )

    def _prepare(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """The rows with adapters in order, and pieces of at most _ROWS, on the device; once for each step."""
        if rows.prepared is None:
            pieces = [
                (slot - 1, first, min(end - first, _ROWS))
                for slot, start, end in rows.groups
                for first in range(start, end, _ROWS)
            ]
            order = rows.order[: rows.groups[-1][2]]
            rows.prepared = tuple(to_device(np.ascontiguousarray(a), self._device) for a in (order, np.array(pieces)))
        assert isinstance(rows.prepared, tuple)
        order, table = rows.prepared
        return order, table
