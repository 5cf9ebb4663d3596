"""Runs several uniform blocks in one native call; a wrapper of stack.c."""

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from weft.engine.kernels.cpu.attention import NativeStep
from weft.engine.kernels.cpu.layers import NativeHeads, NativeLinear, NativeNorm
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.packed import PANEL, Matrix
from weft.engine.kernels.cpu.products import NativeSite, adapter_rows
from weft.engine.kernels.cpu.recurrent import NativeMamba
from weft.engine.layers.block import Attention, Block, BlockStep, GatedFeedForward, Linear, PreNormBlock, run_blocks
from weft.engine.layers.wrapped_linear import LinearWithEpilogue
from weft.engine.lora.adapted_layers import AdaptedActivation, AdaptedLinear, AdapterStep
from weft.engine.parts.mamba import Mamba2Mixer, ParallelMixers

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Layer(ctypes.Structure):
    """`Layer` of stack.c."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "o", "gated", "down")),
        *((name, _POINTER) for name in ("input_norm", "o_norm", "mlp_norm", "down_norm", "head_norm")),
        *(("norm_eps", ctypes.c_double), ("head_norm_eps", ctypes.c_double), ("gate", ctypes.c_int)),
        *((name, _POINTER) for name in ("sinks", "plan", "cache", "rotation", "mamba")),
        *((name, _POINTER) for name in ("qkv_slots", "o_slots", "gated_slots", "down_slots")),
    )


@dataclass(frozen=True, slots=True)
class _NativeParts:
    """The parts of a block that are all native, and the indices of its caches; mamba stands beside attention.

    Attributes:
        norms: Of the inputs of qkv, the outputs of o, the inputs of gated and the outputs of down.
        sites: Where adapters add to the matrices; empty if there is no place for adapters.
        step: Says which rows have adapters; None if there is no place for adapters.
    """

    norms: tuple[NativeNorm, NativeNorm | None, NativeNorm, NativeNorm | None]
    heads: NativeHeads
    matrices: tuple[NativeLinear, ...]
    sites: tuple[NativeSite, ...]
    cache: int
    rotation: int
    sinks: torch.Tensor | None
    mamba: NativeMamba | None
    mamba_cache: int
    step: AdapterStep | None

    @property
    def shape(self) -> object:
        """Equal for blocks that one call may compute."""
        sizes = tuple((matrix.in_features, matrix.out_features) for matrix in self.matrices)
        mamba = self.mamba and (self.mamba.inputs.outputs, self.mamba.channels, self.mamba.output.inputs)
        return self.heads.num_heads, self.heads.num_kv_heads, sizes, mamba, bool(self.sites)

    def described(self) -> _Layer:
        """The block as C sees it."""
        eps, heads = self.norms[0].eps, self.heads
        norms = (norm and norm.weight.data_ptr() for norm in self.norms)
        sinks = None if self.sinks is None else self.sinks.data_ptr()
        matrices, gate = (matrix.described() for matrix in self.matrices), self.matrices[2].epilogue
        mamba = self.mamba and ctypes.addressof(self.mamba)
        names = ("qkv_slots", "o_slots", "gated_slots", "down_slots")
        slots = dict(zip(names, (site.slots for site in self.sites), strict=False))
        numbers = heads.weight_pointer, eps, heads.eps, gate
        return _Layer(*matrices, *norms, *numbers, sinks, mamba=mamba, **slots)


def _native_parts(block: Block) -> _NativeParts | None:
    """None if some part of the block is not native."""
    mamba, mamba_cache = None, 0
    match block:
        case PreNormBlock(_, ParallelMixers((Attention() as attention, Mamba2Mixer() as mixer))):
            mamba, mamba_cache = NativeMamba.of(mixer), mixer.cache
            block = replace(block, mixer=attention if mamba else None)
    match block:
        case PreNormBlock(
            NativeNorm() as norm,
            Attention(qkv, NativeHeads() as heads, o, _, cache, rotation, sinks, None),
            NativeNorm() as second_norm,
            GatedFeedForward(gated, down),
        ):
            (o, o_norm), (down, down_norm) = _without_norm(o), _without_norm(down)
            layers = (qkv, o, gated, down)
            adapted = [layer for layer in layers if isinstance(layer, AdaptedLinear | AdaptedActivation)]
            sites = tuple(layer.site for layer in adapted if isinstance(layer.site, NativeSite))
            step = adapted[0].step if adapted else None
            inner = [layer.inner if isinstance(layer, AdaptedLinear | AdaptedActivation) else layer for layer in layers]
            matrices = tuple(layer for layer in inner if isinstance(layer, NativeLinear))
            halves_join = not adapted or (isinstance(inner[2], NativeLinear) and inner[2].out_features % PANEL == 0)
            has_gate = len(matrices) == len(layers) and matrices[2].gate is not None
            norms = norm, o_norm, second_norm, down_norm
            have_one_eps = len({each.eps for each in norms if each}) == 1
            if has_gate and have_one_eps and len(sites) == len(adapted) in (0, len(layers)) and halves_join:
                caches = cache, rotation, sinks, mamba, mamba_cache
                return _NativeParts(norms, heads, matrices, sites, *caches, step)
    return None


def _without_norm(linear: Linear) -> tuple[Linear, NativeNorm | None]:
    """A matrix and the norm of its outputs."""
    match linear:
        case LinearWithEpilogue(inner, NativeNorm() as norm):
            return inner, norm
    return linear, None


def fuse(library: NativeLibrary, blocks: Sequence[Block]) -> list[Block]:
    """Join neighbours of one shape whose parts are all native into one block; other blocks stay as they are."""
    fused: list[Block] = []
    parts = [_native_parts(block) for block in blocks]
    for shape, group in itertools.groupby(zip(blocks, parts, strict=True), key=lambda pair: pair[1] and pair[1].shape):
        run = list(group)
        members = [block for block, _ in run]
        fused += [NativeRun(library, members, [p for _, p in run if p])] if shape else members
    return fused


class NativeRun(Block):
    """Uniform blocks that one call computes. The C table holds bare addresses; the blocks keep the memory alive."""

    def __init__(self, library: NativeLibrary, blocks: Sequence[Block], parts: Sequence[_NativeParts]) -> None:
        """Describe blocks of one shape for C; parts are those of each block."""
        self._blocks = blocks
        self._table = (_Layer * len(parts))(*(part.described() for part in parts))
        self._places = [(part.cache, part.heads.num_heads) for part in parts]
        self._rotations = [part.rotation for part in parts]
        self._mambas = [(part.mamba, part.mamba_cache) for part in parts if part.mamba]
        self._adapter_step = parts[0].step
        self._run_layers = library.function("weft_run_layers", _POINTER, _SIZE, _SIZE, _POINTER, _POINTER)

    @override
    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        attention = step.caches.attention
        if not isinstance(attention, NativeStep):
            return run_blocks(self._blocks, hidden, step)
        assert hidden.is_contiguous() and all(rotation.is_contiguous() for rotation in step.rotations)
        rotations = [rotation.data_ptr() for rotation in step.rotations]
        # If only some rows of the last block are wanted, its parts run one by one.
        num_blocks = len(self._table) if step.rows is None else len(self._table) - 1
        for layer, place, rotation in zip(self._table[:num_blocks], self._places, self._rotations, strict=False):
            layer.plan, layer.cache = attention.addresses(*place)
            layer.rotation = rotations[rotation]
        states = step.caches.states
        kept = [mamba.begin(states, cache) for mamba, cache in self._mambas[:num_blocks]] if states else ()
        sizes = num_blocks, hidden.size(0)
        rows = self._adapter_step.rows(hidden.size(0)) if self._adapter_step else None
        self._run_layers(ctypes.addressof(self._table), *sizes, hidden.data_ptr(), rows and adapter_rows(rows))
        del kept
        return run_blocks(self._blocks[num_blocks:], hidden, step)
