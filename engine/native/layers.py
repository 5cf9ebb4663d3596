"""Layers of Weft's own kernels, for bfloat16 on the CPU; see `engine/native/packed.py` and `elementwise.c`.

Matrices may be int8, everything else stays bfloat16. A row's outputs do not depend, bit for bit, on the other rows of a
step. A packed matrix is the only copy of its weights: the embedding reads its rows from the output head when the two
are tied.
"""

import ctypes
from enum import IntEnum

import torch

from engine.layers.gated import TorchGated
from engine.layers.kit import HeadLayer, Layer, Linear
from engine.layers.norm import HeadNorm
from engine.models.config import ModelConfig
from engine.native.library import NativeLibrary
from engine.native.memory import allocate
from engine.native.packed import PANEL, TILE, pack_bf16, pack_int8

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Epilogue(IntEnum):
    """What becomes of the sums; see `weft_linear`."""

    STORE_BF16 = 0
    STORE_F32 = 1
    ADD_BF16 = 2
    GATED_SILU = 3


def supports(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels can compute this model."""
    sizes_fit = config.hidden_size % PANEL == 0 and config.head_dim % TILE == 0 and config.intermediate_size % 2 == 0
    return device.type == "cpu" and dtype == torch.bfloat16 and sizes_fit


class NativeKit:
    """Weft's kernels; see `LayerKit`."""

    copies_tied_table = False

    def __init__(self, library: NativeLibrary, is_int8: bool = False) -> None:
        """Take the functions of a loaded library; is_int8 quantizes every matrix."""
        self.name = f"native{' int8' if is_int8 else ''} ({library.variant})"
        self.is_int8 = is_int8
        self._library = library

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """See `LayerKit`."""
        return NativeLinear(self._library, weight, bias, is_int8=self.is_int8)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> Layer:
        """See `LayerKit`."""
        if activation != "silu" or bias is not None:  # rare enough to do without a kernel of its own
            return TorchGated(self.linear(weight, bias), activation)
        return NativeLinear(self._library, weight, None, is_gated=True, is_int8=self.is_int8)

    def tied(self, table: torch.Tensor) -> tuple[Layer, Linear]:
        """See `LayerKit`."""
        head = NativeLinear(self._library, table, None, is_int8=self.is_int8)
        return head.gather, head

    def norm(self, weight: torch.Tensor, eps: float) -> Layer:
        """See `LayerKit`."""
        function = self._library.function("weft_rms_norm", _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _FLOAT, _POINTER)

        def normalise(inputs: torch.Tensor) -> torch.Tensor:
            num_rows, size = inputs.shape
            outputs = torch.empty(num_rows, size, dtype=torch.bfloat16)
            function(inputs.data_ptr(), size, num_rows, size, weight.data_ptr(), eps, outputs.data_ptr())
            return outputs

        return normalise

    def heads(self, norm: HeadNorm | None, num_heads: int, num_kv_heads: int) -> HeadLayer:
        """See `LayerKit`."""
        function = self._library.function(
            "weft_prepare_heads", _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _FLOAT
        )
        weight = norm.weight.contiguous() if norm else None  # (num_heads + num_kv_heads, head_dim)
        eps = norm.eps if norm else 0.0

        def prepare(qkv: torch.Tensor, rotation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            num_tokens, total_heads, head_dim = qkv.shape
            sizes = (qkv.data_ptr(), total_heads * head_dim, num_tokens, num_heads + num_kv_heads, head_dim)
            function(*sizes, rotation.data_ptr(), None if weight is None else weight.data_ptr(), eps)
            queries, keys, values = qkv.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
            return queries, keys, values

        return prepare


class NativeLinear:
    """A packed matrix; see `Linear`, and `LayerKit.gated` for the gated kind, which is only called."""

    def __init__(
        self,
        library: NativeLibrary,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        is_gated: bool = False,
        is_int8: bool = False,
    ) -> None:
        """Pack a weight (out_features, in_features); of a gated one each half is packed by itself."""
        parts = weight.chunk(2) if is_gated else (weight,)
        self.out_features, self.in_features = parts[0].shape
        self._bias = bias
        self._bias_pointer = None if bias is None else bias.data_ptr()
        # Kept, because fresh memory for the logits of 64 rows costs more than all else of a small model (page faults).
        self._float32 = torch.empty(0)
        self._epilogue = _Epilogue.GATED_SILU if is_gated else _Epilogue.STORE_BF16
        self.matrix = (pack_int8 if is_int8 else pack_bf16)(library, parts)
        self._multiply, self._gather, self._pointers = self.matrix.multiply, self.matrix.gather, self.matrix.pointers

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""
        outputs = torch.empty(inputs.size(0), self.out_features, dtype=torch.bfloat16)
        self._run(inputs, outputs, self._epilogue)
        return outputs

    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor) -> None:
        """See `Linear`."""
        self._run(inputs, residual, _Epilogue.ADD_BF16)

    def to_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        num_values = len(inputs) * self.out_features
        if num_values > self._float32.numel():
            self._float32 = allocate(num_values, torch.float32)
        outputs = self._float32[:num_values].view(len(inputs), self.out_features)
        self._run(inputs, outputs, _Epilogue.STORE_F32)
        return outputs

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` (n,) int64 of the weight, (n, in_features)."""
        rows = torch.empty(len(ids), self.in_features, dtype=torch.bfloat16)
        self._gather(*self._pointers, self.in_features, ids.data_ptr(), len(ids), rows.data_ptr())
        return rows

    def _run(self, inputs: torch.Tensor, outputs: torch.Tensor, epilogue: _Epilogue) -> None:
        self._multiply(
            inputs.data_ptr(),
            inputs.stride(0),
            inputs.size(0),  # len() is a Python function of torch, ten times as slow
            self.in_features,
            *self._pointers,
            self.out_features,
            self._bias_pointer,
            outputs.data_ptr(),
            outputs.stride(0),
            epilogue,
        )
