"""Low-rank adapters on CUDA: two launches for the rows of all adapters of a matrix. Nothing waits for the device."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
from typing_extensions import override

from weft.engine.kernels.triton import adapters_kernels as kernels
from weft.engine.lora.step_rows import Delta, Site, StepRows
from weft.engine.step.transfer import to_device

_ROWS, _OUTS, _RANKS, _LEAST_RANK = 16, 64, 64, 16
"""Rows, outputs and ranks of a tile, and the smallest rank of a matrix unit."""


class TritonSite(Site):
    """The adapters of all slots in one tensor, padded with zeros to the largest rank; allocated at once."""

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
    def add(self, outputs: torch.Tensor, inputs: torch.Tensor, rows: StepRows) -> None:
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

    def _prepare(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
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
