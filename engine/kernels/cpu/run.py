"""A run of uniform blocks in one native call; see `stack.c`."""

import ctypes
import itertools
from collections.abc import Sequence
from typing import cast

import torch

from weft.engine.kernels.cpu.attention import NativeStep
from weft.engine.kernels.cpu.layers import NativeHeads, NativeLinear, NativeNorm
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.layers.block import Attention, Block, BlockStep, GatedFeedForward, PreNormBlock, run_blocks

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


def fuse(library: NativeLibrary, blocks: Sequence[Block]) -> list[Block]:
    """Put neighbours of one shape, all of whose parts are native, into one call; the other blocks stay as they are."""
    fused: list[Block] = []
    for shape, group in itertools.groupby(blocks, key=_shape):
        run = list(group)
        fused += run if shape is None else [NativeRun(library, cast(list[PreNormBlock], run))]
    return fused


class NativeRun:
    """See `Block`. The table has bare addresses: what they point to belongs to the blocks."""

    def __init__(self, library: NativeLibrary, blocks: Sequence[PreNormBlock]) -> None:
        """Describe blocks of one shape for C."""
        self._blocks = blocks
        self._table = (_Layer * len(blocks))(*map(_described, blocks))
        self._places = [_place(block) for block in blocks]
        self._run_layers = library.function("weft_run_layers", _POINTER, _SIZE, _SIZE, _POINTER, _POINTER)

    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        """See `Block`. A last block of which only some rows are wanted is run part by part."""
        if not isinstance(step.attention, NativeStep):
            return run_blocks(self._blocks, hidden, step)
        assert hidden.is_contiguous() and step.rotation.is_contiguous()
        num_blocks = len(self._table) if step.rows is None else len(self._table) - 1
        for layer, place in zip(self._table[:num_blocks], self._places, strict=False):
            layer.plan, layer.cache = step.attention.place(*place)
        sizes = num_blocks, hidden.size(0)
        self._run_layers(ctypes.addressof(self._table), *sizes, hidden.data_ptr(), step.rotation.data_ptr())
        return run_blocks(self._blocks[num_blocks:], hidden, step)


def _parts(block: Block) -> tuple[NativeNorm, NativeHeads, NativeNorm, list[NativeLinear]] | None:
    """The norms, heads and matrices of a block; None when one of them is not native."""
    if not isinstance(block, PreNormBlock):
        return None
    mixer, feed_forward = block.mixer, block.feed_forward
    if not (isinstance(mixer, Attention) and isinstance(feed_forward, GatedFeedForward)):
        return None
    matrices = [m for m in (mixer.qkv, mixer.o, feed_forward.gated, feed_forward.down) if isinstance(m, NativeLinear)]
    norm, heads, second_norm = block.mixer_norm, mixer.heads, block.feed_forward_norm
    if not (isinstance(norm, NativeNorm) and isinstance(second_norm, NativeNorm) and isinstance(heads, NativeHeads)):
        return None
    return (norm, heads, second_norm, matrices) if len(matrices) == 4 else None


def _shape(block: Block) -> object:
    """Equal for blocks that one call may compute; None for a block that is none of them."""
    parts = _parts(block)
    if parts is None:
        return None
    norm, heads, second_norm, matrices = parts
    assert norm.eps == second_norm.eps, "C has one number for both"
    return heads.num_heads, heads.num_kv_heads, [(matrix.in_features, matrix.out_features) for matrix in matrices]


def _place(block: PreNormBlock) -> tuple[int, int]:
    """Index of the block's cache, and the number of its query heads."""
    mixer = block.mixer
    assert isinstance(mixer, Attention) and isinstance(mixer.heads, NativeHeads)
    return mixer.cache, mixer.heads.num_heads


def _described(block: PreNormBlock) -> _Layer:
    """The block as C sees it."""
    parts = _parts(block)
    assert parts is not None
    norm, heads, second_norm, matrices = parts
    pointers = norm.weight.data_ptr(), second_norm.weight.data_ptr(), heads.weight_pointer
    return _Layer(*map(_matrix, matrices), *pointers, norm.eps, heads.eps)


def _matrix(linear: NativeLinear) -> _Matrix:
    weights, *scales = linear.matrix.pointers
    return _Matrix(weights, *(scales or (None,)), linear.bias_pointer, linear.in_features, linear.out_features)
