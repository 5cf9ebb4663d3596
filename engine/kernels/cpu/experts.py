"""Native experts for the CPU; a wrapper of experts.c."""

import ctypes
import itertools
from collections.abc import Callable, Iterator
from math import inf

import torch
from typing_extensions import override

from weft.engine.kernels.cpu.grouped import Form, GroupedRows
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.packed import PANEL, Matrix, PackedMatrix, Storage, pack
from weft.engine.kernels.cpu.tried_forms import TriedForms
from weft.engine.layers.experts import Experts
from weft.engine.layers.routing import Gating
from weft.engine.shared.errors import ModelError
from weft.engine.weights.formats import WeightReader
from weft.engine.weights.refs import ExpertsRef, WeightRef

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
        """Read and pack one expert after another; `supports` has to be asked first.

        Args:
            storage: How to keep matrices that are plain.
            stored_form: That of the groups that the checkpoint has and that are kept; None to read it plain.
            forms: Refuses those that are wrong here, whose matrices are then read plain.
        """
        self.gating = gating
        self._matrices = []
        for ref, num_parts in ((gate_up, 2), (down, 1)):
            weights: Weights = iter(reader.experts(ref))
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


Weights = Iterator[tuple[torch.Tensor | GroupedRows, torch.Tensor | None]]
"""The matrix and the bias of each expert."""


class _PackedExperts:
    """One matrix of all experts; owns its memory."""

    def __init__(
        self, library: NativeLibrary, ref: ExpertsRef, num_parts: int, weights: Weights, storage: Storage
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


def _rows_of(reader: WeightReader, ref: ExpertsRef, form: Form, forms: TriedForms) -> Weights | None:
    """Experts as the checkpoint has them in groups; None if it does not, or the first cannot be kept in this form.

    Raises:
        ModelError: Others do not have it.
    """
    stored = reader.expert_groups(ref)
    first = next(stored)
    if first[0] is None or forms.rows_of(first[0], form) is None:
        return None

    def rows() -> Weights:
        for index, (groups, bias) in enumerate(itertools.chain([first], stored)):
            found = groups and forms.rows_of(groups, form)
            if not found:
                raise ModelError(f"expert {index} of {ref.matrix.names[0]} is not quantized as the others are")
            yield found[1], bias

    return rows()


def supports(gate_up: ExpertsRef, gating: Gating) -> bool:
    """Whether experts.c computes such experts."""
    inner = gate_up.matrix.out_features // 2
    sizes_fit = inner % 2 == 0 and (inner % PANEL == 0 or not gate_up.matrix.has_bias)
    return gating.has_gate and gating.activation in _SLOPES and sizes_fit
