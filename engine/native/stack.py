"""The layers of a decoder in one native call; see `stack.c`."""

import ctypes
from collections.abc import Sequence

import torch

from engine.attention.backend import AttentionStep
from engine.attention.native import NativeStep
from engine.layers.stack import DecoderLayer, LayerStack, PlainStack
from engine.native.layers import NativeHeads, NativeLinear, NativeNorm
from engine.native.library import NativeLibrary

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Matrix(ctypes.Structure):
    """`Matrix` of stack.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("weights", "scales", "bias")),
        *((name, _SIZE) for name in ("inputs", "outputs")),
    )


class _Layer(ctypes.Structure):
    """`Layer` of stack.c."""

    _fields_ = (
        *((name, _Matrix) for name in ("qkv", "o", "gated", "down")),
        *((name, _POINTER) for name in ("input_norm", "mlp_norm", "head_norm")),
        *((name, ctypes.c_double) for name in ("norm_eps", "head_norm_eps")),
        *((name, _POINTER) for name in ("plan", "cache")),
    )


def make_stack(library: NativeLibrary, layers: Sequence[DecoderLayer], head_dim: int) -> LayerStack:
    """The layers in one call, if all of their parts are native."""
    plain = PlainStack(layers, head_dim)
    table = [entry for layer in layers if (entry := _described(layer)) is not None]
    heads = layers[0].heads
    if len(table) < len(layers) or not isinstance(heads, NativeHeads):
        return plain
    return NativeStack(library, table, plain, heads.num_heads)


class NativeStack:
    """See `LayerStack`. The table has bare addresses: what they point to belongs to the plain stack."""

    def __init__(self, library: NativeLibrary, table: Sequence[_Layer], plain: PlainStack, num_heads: int) -> None:
        """Take the descriptions of all layers, which are of one shape, and what calls their parts singly."""
        self._table = (_Layer * len(table))(*table)
        self._plain = plain
        self._num_heads = num_heads
        self._run_layers = library.function("weft_run_layers", _POINTER, _SIZE, _SIZE, _POINTER, _POINTER)

    def run(
        self, hidden: torch.Tensor, rotation: torch.Tensor, attention: AttentionStep, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """See `LayerStack`. A last layer that computes some of the rows alone is run part by part."""
        if not isinstance(attention, NativeStep):
            return self._plain.run(hidden, rotation, attention, rows)
        assert hidden.is_contiguous() and rotation.is_contiguous()
        num_layers = len(self._table) if rows is None else len(self._table) - 1
        for index in range(num_layers):
            layer = self._table[index]
            layer.plan, layer.cache = attention.place(index, self._num_heads)
        sizes = num_layers, hidden.size(0)
        self._run_layers(ctypes.addressof(self._table), *sizes, hidden.data_ptr(), rotation.data_ptr())
        return self._plain.run_from(num_layers, hidden, rotation, attention, rows)


def _described(layer: DecoderLayer) -> _Layer | None:
    """The layer as C sees it; None when a part is not native."""
    input_norm, mlp_norm, heads = layer.input_norm, layer.mlp_norm, layer.heads
    if not (isinstance(input_norm, NativeNorm) and isinstance(mlp_norm, NativeNorm) and isinstance(heads, NativeHeads)):
        return None
    assert input_norm.eps == mlp_norm.eps, "C has one number for both"
    matrices = [_matrix(part) for part in (layer.qkv, layer.o, layer.gated, layer.down)]
    if not all(matrices):
        return None
    norms = (input_norm.weight.data_ptr(), mlp_norm.weight.data_ptr(), heads.weight_pointer)
    return _Layer(*matrices, *norms, input_norm.eps, heads.eps)


def _matrix(part: object) -> _Matrix | None:
    if not isinstance(part, NativeLinear):
        return None
    weights, *scales = part.matrix.pointers
    return _Matrix(weights, *(scales or (None,)), part.bias_pointer, part.in_features, part.out_features)
