"""Experts for CUDA: one product for the rows of all experts of a layer, whose matrices are plain or packed.

Nothing waits for the device, and all shapes follow from those of the inputs, so that a CUDA graph can hold a layer.
"""

from functools import partial

import torch
import triton
from typing_extensions import override

from weft.engine.kernels.triton import experts_kernels as kernels
from weft.engine.kernels.triton.layers import OWN_ACTIVATIONS, GatedActivation
from weft.engine.kernels.triton.packed import PackedMatrix
from weft.engine.layers.experts import Experts, join
from weft.engine.layers.routing import Gating

_GROUPED_MAJORS = 9, 10
"""Of compute capabilities for which torch has a grouped product. For others it waits, and goes expert by expert."""

_MANY_ROWS = 32
"""Rows of an expert, on average, from which on a program computes 64 of them instead of 16."""

_MIX_BLOCK = 1024


class TritonExperts(Experts):
    """torch's grouped product or Weft's own, and Weft's kernels around it."""

    def __init__(
        self,
        gate_up: torch.Tensor | PackedMatrix,
        gate_up_bias: torch.Tensor | None,
        down: torch.Tensor | PackedMatrix,
        down_bias: torch.Tensor | None,
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
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> None:
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

    def first(self, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        """What gate and up projection of an expert make, gate first."""
        return self._multiply(inputs, *self._gate_up, *self._alone(expert, len(inputs)))

    def second(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        """What its down projection makes."""
        return self._multiply(inner, *self._down, *self._alone(expert, len(inner)))

    def _alone(self, expert: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The expert of each row, and where the rows of every expert end, if all are of one."""
        return self._numbers.new_full((num_rows,), expert), (self._numbers >= expert).int() * num_rows

    def _multiply(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor | PackedMatrix,
        bias: torch.Tensor | None,
        experts: torch.Tensor,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        if isinstance(weight, PackedMatrix):
            packed = rows.new_empty(len(rows), weight.out_features)
            return weight.multiply(rows, bias, packed, ends=ends, is_deterministic=self._is_deterministic)
        if self._is_grouped and supports_grouped(weight):
            outputs: torch.Tensor = torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)
            return outputs if bias is None else outputs.add_(bias.index_select(0, experts))
        return multiply_groups(rows, weight, bias, ends, self._is_deterministic)


def supports_grouped(weight: torch.Tensor) -> bool:
    """Whether torch's grouped product takes weight (num_experts, num_outs, columns)."""
    is_aligned = weight.size(1) % 8 == 0 and weight.size(2) % 8 == 0  # 16 bytes
    return is_aligned and has_grouped(weight.device, weight.dtype)


def has_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a grouped product there."""
    if device.type != "cuda" or dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    return torch.cuda.get_device_capability(device)[0] in _GROUPED_MAJORS


def multiply_groups(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor, is_deterministic: bool
) -> torch.Tensor:
    """Weft's grouped product: rows (num_rows, columns) in the order of their experts -> (num_rows, num_outs)."""
    num_experts, num_outs, columns = weight.shape
    block_rows = 64 if is_deterministic or len(rows) >= _MANY_ROWS * num_experts else 16
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
