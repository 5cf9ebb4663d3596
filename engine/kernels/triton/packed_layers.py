"""Layers over packed matrices.

For up to _MOST_ROWS rows a product reads the packed matrix, in 64 rows at a time. Beyond, it would unpack each weight
once more for every 64 rows and run below the speed of cuBLAS. Unpacking a part of the matrix once moves 4.5 bytes a
weight at 4 bits, which takes as long as about 250 rows of arithmetic; then cuBLAS has the rest. Parts are small, so
that they take little memory.

With activations in fp8, which only checkpoints have that were made for it, many rows are multiplied in fp8: by torch's
product for scales of outputs, by Weft's for scales of groups. Each row, or group of a row, gets a scale of its own. Few
rows stay in 16 bits, since reading the weights takes as long in both.
"""

import torch
import triton
from typing_extensions import override

from weft.engine.kernels.triton import packed_kernels as kernels
from weft.engine.kernels.triton.packed import MANY_ROWS, PackedMatrix
from weft.engine.layers.parts import Linear

_MOST_ROWS = 256
_PART_BYTES = 64 << 20
_PART_ROWS = 64
"""Rows of a part are a multiple, since cuBLAS is slow with outputs that begin between multiples of 16 bytes."""

_GROUP = 128
"""Inputs with a scale of their own in an fp8 product."""


class PackedLinear(Linear):
    """A matrix that stays packed, with its bias."""

    def __init__(self, matrix: PackedMatrix, bias: torch.Tensor | None, *, is_deterministic: bool = False) -> None:
        """Take both; is_deterministic: a row's bits do not depend on how many rows there are."""
        self.matrix, self.bias = matrix, bias
        self._is_deterministic = is_deterministic

    @override
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._multiply(inputs, inputs.dtype) if self._is_packed(inputs) else self._many(inputs)

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        if self._is_packed(inputs):
            self.matrix.multiply(inputs, self.bias, residual, adds=True, is_deterministic=self._is_deterministic)
        else:
            residual += self._many(inputs)

    @override
    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._multiply(inputs, torch.float32)  # however many rows: those of `_many` are rounded

    def gather(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the matrix, as an embedding."""
        return self.matrix.unpack(dtype, ids=ids)

    def _multiply(self, inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        outputs = inputs.new_empty(len(inputs), self.matrix.out_features, dtype=dtype)
        return self.matrix.multiply(inputs, self.bias, outputs, is_deterministic=self._is_deterministic)

    def _is_packed(self, inputs: torch.Tensor) -> bool:
        return self._is_deterministic or len(inputs) <= _MOST_ROWS

    def _many(self, inputs: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix
        outputs = inputs.new_empty(len(inputs), matrix.out_features)
        size = max(_PART_BYTES // (inputs.itemsize * matrix.in_features) // _PART_ROWS, 1) * _PART_ROWS
        for first in range(0, matrix.out_features, size):
            part = matrix.unpack(inputs.dtype, first=first, num_rows=min(size, matrix.out_features - first))
            torch.mm(inputs, part.t(), out=outputs[:, first : first + size])
        return outputs if self.bias is None else outputs.add_(self.bias)


class Fp8Linear(PackedLinear):
    """A matrix in e4m3 that many rows multiply in fp8; ask `supports` first, and the GPU has to have fp8."""

    def __init__(self, matrix: PackedMatrix, bias: torch.Tensor | None) -> None:
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
    def _is_packed(self, inputs: torch.Tensor) -> bool:
        return len(inputs) <= MANY_ROWS

    @override
    def _many(self, inputs: torch.Tensor) -> torch.Tensor:
        rounded, scales = round_rows(inputs, self.matrix.form.group)
        if self.matrix.form.group is None:
            outputs: torch.Tensor = torch._scaled_mm(
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


def round_rows(inputs: torch.Tensor, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
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
