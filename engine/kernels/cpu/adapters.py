"""Low-rank adapters on the CPU, in bfloat16; a wrapper of adapters.c. A row has the same bits in any step."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from typing_extensions import override

from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.memory import allocate
from weft.engine.kernels.cpu.packed import PANEL, panels
from weft.engine.lora.step_rows import Delta, Site, StepRows

MAX_RANK = 512
"""As in adapters.c."""

_PIECE_ROWS, _INPUTS = 8, 4
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Delta(ctypes.Structure):
    """`Delta` of kernels.h."""

    _fields_ = (("a", _POINTER), ("b", _POINTER), ("rank", _SIZE), ("first", _SIZE), ("size", _SIZE))


class _Slot(ctypes.Structure):
    """`Slot` of kernels.h."""

    _fields_ = (("deltas", _POINTER), ("num_deltas", _SIZE))


class _Rows(ctypes.Structure):
    """`AdapterRows` of kernels.h."""

    _fields_ = (("rows", _POINTER), ("pieces", _POINTER), ("num_adapted", _SIZE), ("num_pieces", _SIZE))


def adapter_rows(rows: StepRows) -> int:
    """The rows of a step as C sees them: an address that is good as long as they are."""
    if rows.prepared is None:
        last = rows.groups[-1][2] if rows.groups else 0
        groups = [*rows.groups, (0, last, len(rows.order))]
        pieces = [
            (slot, first, min(end - first, _PIECE_ROWS))
            for slot, start, end in groups
            for first in range(start, end, _PIECE_ROWS)
        ]
        order, table = np.ascontiguousarray(rows.order, np.int64), np.array(pieces, np.int64)
        num_adapted = sum(slot > 0 for slot, _, _ in pieces)
        described = _Rows(order.ctypes.data, table.ctypes.data, num_adapted, len(pieces))
        rows.prepared = ctypes.addressof(described), described, order, table
    assert isinstance(rows.prepared, tuple)
    address: int = rows.prepared[0]
    return address


class AdapterMemory:
    """Gives pieces of large arrays, which have huge pages; an array is freed when all its pieces are."""

    _NUM_VALUES = 1 << 22

    def __init__(self) -> None:
        """Begin without an array."""
        self._array, self._used = torch.empty(0, dtype=torch.bfloat16), 0

    def take(self, num_values: int) -> torch.Tensor:
        """A flat tensor behind the last one."""
        if self._used + num_values > len(self._array):
            self._array, self._used = allocate(max(num_values, self._NUM_VALUES), torch.bfloat16), 0
        taken = self._array[self._used : self._used + num_values]
        self._used += num_values
        return taken


class NativeSite(Site):
    """Keeps each adapter in the layout of adapters.c; its memory is allocated when the adapter comes."""

    def __init__(
        self,
        library: NativeLibrary,
        memory: AdapterMemory,
        in_features: int,
        max_loras: int,
        num_reserved_bytes: int,
    ) -> None:
        """Begin without adapters in slots 1 to max_loras; memory is that of all sites, which are filled in turn."""
        self.num_reserved_bytes = num_reserved_bytes
        self._memory = memory
        self._in_features = in_features
        self._slots = (_Slot * (max_loras + 1))()
        self.slots = ctypes.addressof(self._slots)
        self._kept: dict[int, object] = {}
        pointers = _POINTER, _POINTER, _POINTER
        self._adapt = library.function("weft_adapt", _POINTER, _SIZE, _SIZE, *pointers, _SIZE, _SIZE)

    @override
    def put(self, slot: int, deltas: Sequence[Delta]) -> None:
        packed = [(self._pack(delta.a, _INPUTS), self._pack(delta.b, PANEL)) for delta in deltas]
        table = (_Delta * len(deltas))(
            *(
                _Delta(a.data_ptr(), b.data_ptr(), a.size(0) * PANEL, delta.first, len(delta.b))
                for delta, (a, b) in zip(deltas, packed, strict=True)
            )
        )
        self._slots[slot] = _Slot(ctypes.addressof(table), len(deltas))
        self._kept[slot] = packed, table

    @override
    def add(self, outputs: torch.Tensor, inputs: torch.Tensor, rows: StepRows) -> None:
        assert inputs.stride(1) == 1 and outputs.stride(1) == 1, "the values of a row must be contiguous"
        self._adapt(
            *(inputs.data_ptr(), inputs.stride(0), self._in_features, self.slots, adapter_rows(rows)),
            *(outputs.data_ptr(), outputs.stride(0), outputs.dtype == torch.float32),
        )

    def _pack(self, matrix: torch.Tensor, multiple: int) -> torch.Tensor:
        """A matrix in panels, its inputs padded to a multiple.

        By torch's operations only, since native functions take calls from one thread at a time.
        """
        pairs = panels(matrix, multiple)
        return self._memory.take(pairs.numel()).view(pairs.shape).copy_(pairs)
