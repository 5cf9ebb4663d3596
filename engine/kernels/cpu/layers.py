"""Native layers for the CPU: matrices, norms and heads, and a trial of matrices in groups before they are used.

They wrap linear.c, linear_grouped.c and elementwise.c.
"""

import ctypes
import logging
from enum import IntEnum

import torch
from torch import Tensor
from typing_extensions import override

from weft.engine.kernels.cpu.library import NativeLibrary, allocate
from weft.engine.kernels.cpu.packed import Form, GroupedRows, Matrix, Storage, pack, rows_of
from weft.engine.layers.block import Linear, PagedCache
from weft.engine.layers.norm import HeadNorm
from weft.engine.weights.groups import Groups

logger = logging.getLogger(__name__)

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Epilogue(IntEnum):
    """What happens to the sums; see `weft_linear`."""

    STORE_BF16 = 0
    STORE_F32 = 1
    ADD_BF16 = 2
    STORE_GELU = 3
    GATED_SILU = 4
    GATED_GELU = 6
    GATED_TANH = 7


GATES = {"silu": _Epilogue.GATED_SILU, "gelu": _Epilogue.GATED_GELU, "gelu_pytorch_tanh": _Epilogue.GATED_TANH}
"""Of the activations that gated matrices can have."""


class NativeNorm:
    """RMSNorm of rows."""

    def __init__(self, library: NativeLibrary, weight: Tensor, eps: float) -> None:
        """Multiply by weight (size of a row,)."""
        self.weight, self.eps = weight.float().contiguous(), eps
        sizes = _SIZE, _SIZE, _SIZE
        self._function = library.function("weft_rms_norm", _POINTER, *sizes, _POINTER, _FLOAT, _POINTER, _SIZE)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Same shape as inputs (num_rows, size)."""
        num_rows, size = inputs.shape
        outputs = torch.empty(num_rows, size, dtype=torch.bfloat16)
        pointers = self.weight.data_ptr(), self.eps, outputs.data_ptr()
        self._function(inputs.data_ptr(), inputs.stride(0), num_rows, size, *pointers, False)
        return outputs


class NativeLayerNorm:
    """LayerNorm of rows."""

    def __init__(self, library: NativeLibrary, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        """Multiply by weight and add bias, (size of a row,) both; None adds nothing."""
        self._weight, self._bias = weight.float().contiguous(), None if bias is None else bias.float().contiguous()
        self._eps = eps
        sizes = _SIZE, _SIZE, _SIZE
        self._function = library.function("weft_layer_norm", _POINTER, *sizes, _POINTER, _POINTER, _FLOAT, _POINTER)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Same shape as inputs (num_rows, size)."""
        num_rows, size = inputs.shape
        outputs = torch.empty(num_rows, size, dtype=torch.bfloat16)
        bias = None if self._bias is None else self._bias.data_ptr()
        pointers = self._weight.data_ptr(), bias, self._eps, outputs.data_ptr()
        self._function(inputs.data_ptr(), inputs.stride(0), num_rows, size, *pointers)
        return outputs


class NativeHeads:
    """A `HeadLayer` that works in place."""

    def __init__(self, library: NativeLibrary, norm: HeadNorm | None, num_heads: int, num_kv_heads: int) -> None:
        """If norm is None, only rotate."""
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self._weight = norm.weight.float().contiguous() if norm else None  # (num_heads + num_kv_heads, head_dim)
        self.weight_pointer = None if self._weight is None else self._weight.data_ptr()
        self.eps = norm.eps if norm else 0.0
        sizes = _SIZE, _SIZE, _SIZE, _SIZE
        self._function = library.function("weft_prepare_heads", _POINTER, *sizes, _POINTER, _POINTER, _FLOAT)

    def __call__(self, qkv: Tensor, rotation: Tensor, cache: PagedCache | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """See `HeadLayer`."""
        assert cache is None, "these kernels leave writing K/V to the attention backend"
        num_tokens, total_heads, head_dim = qkv.shape
        sizes = (total_heads * head_dim, num_tokens, self.num_heads + self.num_kv_heads, head_dim)
        self._function(qkv.data_ptr(), *sizes, rotation.data_ptr(), self.weight_pointer, self.eps)
        queries, keys, values = qkv.split_with_sizes((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return queries, keys, values


class NativePerHead:
    """A packed bfloat16 matrix for each head; see `LayerKernels.per_head`."""

    def __init__(self, library: NativeLibrary, weights: Tensor) -> None:
        """Pack weights (num_heads, out_features, in_features)."""
        num_heads, out_features, in_features = weights.shape
        self._matrix = pack(library, weights.unbind(0), num_heads, (out_features, in_features), "bfloat16")
        self._sizes = num_heads, in_features, self._matrix.tensors[0].data_ptr(), out_features
        sizes = _SIZE, _SIZE, _SIZE, _SIZE, _SIZE
        self._multiply = library.function("weft_linear_heads", _POINTER, *sizes, _POINTER, _SIZE, _POINTER)

    def __call__(self, heads: Tensor) -> Tensor:
        """Heads (num_tokens, num_heads, in_features) -> (num_tokens, num_heads, out_features)."""
        num_tokens, (num_heads, in_features, pointer, out_features) = heads.size(0), self._sizes
        assert heads.stride(2) == 1, "the values of a head must be contiguous"
        outputs = torch.empty(num_tokens, num_heads, out_features, dtype=torch.bfloat16)
        inputs = heads.data_ptr(), heads.stride(0), heads.stride(1), num_tokens, num_heads
        self._multiply(*inputs, in_features, pointer, out_features, outputs.data_ptr())
        return outputs


class NativeLinear(Linear):
    """A packed matrix. A gated one implements `LayerKernels.gated`, and only its `__call__` may be used."""

    def __init__(
        self,
        library: NativeLibrary,
        weight: Tensor | GroupedRows,
        bias: Tensor | None,
        *,
        gate: str | None = None,
        storage: Storage = "bfloat16",
        is_beside_steps: bool = False,
    ) -> None:
        """Pack a weight (out_features, in_features); the halves of a gated one are packed separately.

        Args:
            gate: The activation of a gated one, a key of GATES.
            weight: Plain, or in groups of the form that `storage` is.
            is_beside_steps: See `pack`.
        """
        parts = weight.chunk(2) if gate else (weight,)
        self.gate = gate
        self.out_features, self.in_features = parts[0].shape
        self._bias = bias
        self.bias_pointer = None if bias is None else bias.data_ptr()
        # Kept: for a small model, the page faults of fresh memory for 64 rows of logits cost more than all other work.
        self._float32 = torch.empty(0)
        self.epilogue = GATES[gate] if gate else _Epilogue.STORE_BF16
        shape = self.out_features, self.in_features
        self.matrix = pack(library, parts, len(parts), shape, storage, is_beside_steps=is_beside_steps)
        self._join = library.function("weft_gate", _SIZE, _POINTER, _SIZE, _SIZE, _POINTER)
        self._matrix = self.in_features, *self.matrix.arguments, self.out_features, self.bias_pointer

    def described(self) -> Matrix:
        """The matrix as C sees it."""
        return self.matrix.described(self.bias_pointer, (self.out_features, self.in_features))

    @override
    def __call__(self, inputs: Tensor) -> Tensor:
        outputs = torch.empty(inputs.size(0), self.out_features, dtype=torch.bfloat16)
        self._run(inputs, outputs, self.epilogue)
        return outputs

    @override
    def add_to(self, residual: Tensor, inputs: Tensor) -> None:
        self._run(inputs, residual, _Epilogue.ADD_BF16)

    @override
    def to_float32(self, inputs: Tensor) -> Tensor:
        num_values = len(inputs) * self.out_features
        if num_values > self._float32.numel():
            self._float32 = allocate(num_values, torch.float32)
        outputs = self._float32[:num_values].view(len(inputs), self.out_features)
        self._run(inputs, outputs, _Epilogue.STORE_F32)
        return outputs

    def gelu(self, inputs: Tensor) -> Tensor:
        """The GELU of the outputs."""
        outputs = torch.empty(inputs.size(0), self.out_features, dtype=torch.bfloat16)
        self._run(inputs, outputs, _Epilogue.STORE_GELU)
        return outputs

    def sums(self, inputs: Tensor) -> Tensor:
        """Those of a gated matrix in float32, gate first; see `Activated`."""
        outputs = torch.empty(inputs.size(0), 2 * self.out_features)
        for half, target in enumerate(outputs.chunk(2, 1)):
            rows = inputs.data_ptr(), inputs.stride(0), inputs.size(0)
            matrix = self.in_features, *self.matrix.part(half), self.out_features, None
            self.matrix.multiply(*rows, *matrix, target.data_ptr(), outputs.stride(0), _Epilogue.STORE_F32)
        return outputs

    def activate(self, sums: Tensor) -> Tensor:
        """As the gated matrix does it, with the same bits; see `Activated`."""
        outputs = torch.empty(sums.size(0), self.out_features, dtype=torch.bfloat16)
        self._join(self.epilogue, sums.data_ptr(), sums.size(0), self.out_features, outputs.data_ptr())
        return outputs

    def gather(self, ids: Tensor) -> Tensor:
        """Rows of the weight: ids (n,) int64 -> (n, in_features)."""
        rows = torch.empty(len(ids), self.in_features, dtype=torch.bfloat16)
        self.matrix.gather(*self.matrix.arguments, self.in_features, ids.data_ptr(), len(ids), rows.data_ptr())
        return rows

    def _run(self, inputs: Tensor, outputs: Tensor, epilogue: _Epilogue) -> None:
        rows = inputs.data_ptr(), inputs.stride(0), inputs.size(0)  # ten times as fast as len(), a Python function
        self.matrix.multiply(*rows, *self._matrix, outputs.data_ptr(), outputs.stride(0), epilogue)


_TRIED_OUTPUTS = 72
"""Panels of 16, of which the last is not whole."""

_TRIED_INPUTS = 4096
"""Used of longer rows: four times what tiles take at once."""

_TRIED_ROWS = (1, 3, 6, 40)
"""One number for every way in which rows are multiplied."""

_TOLERANCE = 0.02
"""Largest relative error of a row; half precision and bfloat16 cause up to a quarter of it."""


class TriedForms:
    """The forms that were tried with a library, and whether their products are right.

    A form is tried on the first matrix of a checkpoint that has it, before the kernels get the others. Some of its
    outputs are packed and multiplied, and compared with dequantized weights in float32. Inputs are whole numbers of one
    byte, which the kernels do not round, so that the precision of scales is all that remains. This takes a few
    milliseconds. A form that is wrong here costs memory and speed, not answers: its matrices are kept in bfloat16.
    """

    def __init__(self, library: NativeLibrary) -> None:
        """Take the functions of a loaded library."""
        self._library = library
        self._are_right: dict[Form, bool] = {}

    def is_wrong(self, form: Form) -> bool:
        """Whether the form was tried and its products are wrong."""
        return not self._are_right.get(form, True)

    def rows_of(self, groups: Groups, wanted: Form | None = None) -> tuple[Form, GroupedRows] | None:
        """As `packed.rows_of`; None for a form that is wrong, too."""
        found = rows_of(groups, wanted)
        if found and found[0] not in self._are_right:
            self._are_right[found[0]] = self._is_right(found[0], groups)
        return None if found is None or self.is_wrong(found[0]) else found

    def _is_right(self, form: Form, groups: Groups) -> bool:
        error = self._error(form, groups)
        name = f"{form.bits} bits in groups of {form.group}{' with offsets' * form.has_offset}"
        if error <= _TOLERANCE:
            logger.info("matrices of %s: %s, error %.2g", name, self._library.variant, error)
            return True
        logger.warning(
            "matrices of %s are kept in bfloat16: the products of %s differ by %.2g from those of dequantized weights "
            "(bound: %g)",
            *(name, self._library.variant, error, _TOLERANCE),
        )
        return False

    def _error(self, form: Form, groups: Groups) -> float:
        """The largest of any row of products, or of weights; NaN if some are no numbers."""
        outputs = torch.arange(min(_TRIED_OUTPUTS, len(groups.values)))
        tile = groups.part(outputs, slice(_TRIED_INPUTS)).without_table()
        found = rows_of(tile, form)
        assert found is not None, "the whole matrix has this form"
        linear, exact = NativeLinear(self._library, found[1], None, storage=form), tile.dequantize(torch.float32)
        inputs = _tried_inputs(exact.shape[1])
        products = inputs.float() @ exact.T
        errors = [_row_errors(linear.to_float32(inputs[:rows]), products[:rows]) for rows in _TRIED_ROWS]
        return float(torch.cat([_row_errors(linear.gather(outputs), exact), *errors]).max())


def _tried_inputs(num_inputs: int) -> Tensor:
    """(rows, num_inputs): the largest of every group is 127, so that its scale is 1."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(-127, 128, (max(_TRIED_ROWS), num_inputs), generator=generator)
    inputs[:, ::16] = 127
    return inputs.bfloat16()


def _row_errors(rows: Tensor, exact: Tensor) -> Tensor:
    distances: Tensor = torch.linalg.vector_norm(rows - exact, dim=1)
    lengths: Tensor = torch.linalg.vector_norm(exact, dim=1)
    return distances / lengths.clamp_min(1e-6)
