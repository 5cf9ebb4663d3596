"""Native products of the CPU for which each row has its own matrices: experts, and low-rank adapters in bfloat16.

They wrap experts.c and adapters.c. A row has the same bits in any step.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from math import inf

import numpy as np
import torch
from typing_extensions import override

from weft.engine.families.experts import Gating
from weft.engine.kernels.cpu.layers import TriedForms
from weft.engine.kernels.cpu.library import NativeLibrary, allocate
from weft.engine.kernels.cpu.packed import PANEL, Form, GroupedRows, Matrix, PackedMatrix, Storage, pack, panels
from weft.engine.layers.feed_forward import Experts
from weft.engine.lora.adapted_layers import Delta, Site, StepRows
from weft.engine.weights.reader import ExpertsRef, WeightReader, WeightRef
from weft.engine.wire.errors import ModelError

_STORE_F32 = 1
"""See `weft_linear`."""

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64

_SLOPES = {"silu": (1.0, 0.0), "quick_gelu": (1.702, 0.0), "gelu_pytorch_tanh": (1.5957691216057308, 0.044715)}
"""Activations that are gate * sigmoid(slope * (gate + cubic * gate ** 3)): their slope and cubic."""


class _Experts(ctypes.Structure):
    """`Experts` of experts.c."""

    _fields_ = (
        ("gate_up", Matrix),
        ("down", Matrix),
        ("num_experts", _SIZE),
        *((name, ctypes.c_float) for name in ("slope", "cubic", "limit", "offset")),
        ("is_plain", ctypes.c_int32),
    )


_Weights = Iterator[tuple[torch.Tensor | GroupedRows, torch.Tensor | None]]
"""The matrix and the bias of each expert."""


class NativeExperts(Experts):
    """Packed experts. The bits of a token's outputs do not depend on the other tokens."""

    def __init__(
        self,
        library: NativeLibrary,
        gate_up: ExpertsRef,
        down: ExpertsRef,
        reader: WeightReader,
        gating: Gating,
        storage: Callable[[WeightRef], Storage],
        stored_form: Callable[[WeightRef], Form | None],
        forms: TriedForms,
    ) -> None:
        """Read and pack one expert after another; `supports_experts` has to be asked first.

        Args:
            storage: How to keep matrices that are plain.
            stored_form: That of the groups that the checkpoint has and that are kept; None to read it plain.
            forms: Refuses those that are wrong here, whose matrices are then read plain.
        """
        self.gating = gating
        self._matrices = []
        for ref, num_parts in ((gate_up, 2), (down, 1)):
            weights: _Weights = iter(reader.experts(ref))
            kept = storage(ref.matrix)
            if (form := stored_form(ref.matrix)) and (rows := _rows_of(reader, ref, form, forms)):
                kept, weights = form, rows
            self._matrices.append(_PackedExperts(library, ref, num_parts, weights, kept))
        slope, cubic = _SLOPES[gating.activation]
        is_plain = gating == Gating() and not gate_up.matrix.has_bias
        self._described = _Experts(
            *(matrix.described for matrix in self._matrices),
            gate_up.num_experts,
            *(slope * gating.slope, cubic, inf if gating.limit is None else gating.limit, gating.up_offset),
            is_plain,
        )
        sizes = _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE
        self._function = library.function("weft_experts", _POINTER, *sizes)

    def first(self, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        """What gate and up projection of an expert make, gate first, in float32."""
        return self._matrices[0].multiply(expert, inputs)

    def second(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        """What its down projection makes, in float32."""
        return self._matrices[1].multiply(expert, inner)

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> None:
        ids, shares = ids.contiguous(), shares.contiguous()
        self._function(
            ctypes.addressof(self._described),
            *(inputs.data_ptr(), inputs.stride(0), inputs.size(0), ids.data_ptr(), shares.data_ptr(), ids.size(1)),
            *(residual.data_ptr(), residual.stride(0)),
        )


class _PackedExperts:
    """One matrix of all experts; owns its memory."""

    def __init__(
        self, library: NativeLibrary, ref: ExpertsRef, num_parts: int, weights: _Weights, storage: Storage
    ) -> None:
        expert, biases = ref.matrix, []

        def parts() -> Iterator[torch.Tensor | GroupedRows]:
            for weight, bias in weights:
                if bias is not None:
                    biases.append(bias)
                yield from weight.chunk(num_parts)

        shape = expert.out_features // num_parts, expert.in_features
        self._num_parts = num_parts
        self._matrix: PackedMatrix = pack(library, parts(), num_parts * ref.num_experts, shape, storage)
        self._bias = torch.stack(biases) if biases else None
        bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self.described = self._matrix.described(bias_pointer, shape)

    def multiply(self, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        """What the parts of one expert make, side by side, in float32."""
        num_outputs, num_inputs = self.described.outputs, self.described.inputs
        outputs = torch.empty(len(inputs), self._num_parts * num_outputs)
        biases = [None] * self._num_parts if self._bias is None else self._bias[expert].chunk(self._num_parts)
        for part, (target, bias) in enumerate(zip(outputs.chunk(self._num_parts, 1), biases, strict=True)):
            matrix = self._matrix.part(expert * self._num_parts + part)
            self._matrix.multiply(
                *(inputs.data_ptr(), inputs.stride(0), len(inputs), num_inputs, *matrix, num_outputs),
                *(None if bias is None else bias.data_ptr(), target.data_ptr(), outputs.stride(0), _STORE_F32),
            )
        return outputs


def _rows_of(reader: WeightReader, ref: ExpertsRef, form: Form, forms: TriedForms) -> _Weights | None:
    """Experts as the checkpoint has them in groups; None if it does not, or the first cannot be kept in this form.

    Raises:
        ModelError: Others do not have it.
    """
    stored = reader.expert_groups(ref)
    first = next(stored)
    if first[0] is None or forms.rows_of(first[0], form) is None:
        return None

    def rows() -> _Weights:
        for index, (groups, bias) in enumerate(itertools.chain([first], stored)):
            found = groups and forms.rows_of(groups, form)
            if not found:
                raise ModelError(f"expert {index} of {ref.matrix.names[0]} is not quantized as the others are")
            yield found[1], bias

    return rows()


def supports_experts(gate_up: ExpertsRef, gating: Gating) -> bool:
    """Whether experts.c computes such experts."""
    inner = gate_up.matrix.out_features // 2
    sizes_fit = inner % 2 == 0 and (inner % PANEL == 0 or not gate_up.matrix.has_bias)
    return gating.has_gate and gating.activation in _SLOPES and sizes_fit


MAX_RANK = 512
"""As in adapters.c."""

_PIECE_ROWS, _INPUTS = 8, 4


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
        self, library: NativeLibrary, memory: AdapterMemory, in_features: int, max_loras: int, num_reserved_bytes: int
    ) -> None:
        """Begin without adapters in slots 1 to max_loras; memory is that of all sites, which are filled in turn."""
        self.num_reserved_bytes = num_reserved_bytes
        self._memory = memory
        self._in_features = in_features
        self._slots = (_Slot * (max_loras + 1))()
        self.slots = ctypes.addressof(self._slots)
        self._kept: dict[int, object] = {}
        pointers = _POINTER, _POINTER, _POINTER
        self._adapt = library.function("weft_adapt", _POINTER, _SIZE, _SIZE, *pointers, _SIZE, _SIZE, _POINTER, _SIZE)

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
            *(outputs.data_ptr(), outputs.stride(0), outputs.dtype == torch.float32, None, 0),
        )

    def _pack(self, matrix: torch.Tensor, multiple: int) -> torch.Tensor:
        """A matrix in panels, its inputs padded to a multiple.

        By torch's operations only, since native functions take calls from one thread at a time.
        """
        pairs = panels(matrix, multiple)
        return self._memory.take(pairs.numel()).view(pairs.shape).copy_(pairs)
