"""Weft's own kernels for the CPU as a model takes them: its layers, in bfloat16, and its sampler.

Matrices may be in groups of 4, 6 or 8 bits, those that the checkpoint has or of rounded weights; weights of norms are
float32, and everything else stays bfloat16. The bits of a row's outputs do not depend on the other rows of a step. A
packed matrix is the only copy of its weights: a tied embedding reads its rows from the output head.
"""

import ctypes
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from typing_extensions import override

from weft.engine.batch import RowMasks, SamplingBatch
from weft.engine.describe.config import ModelConfig
from weft.engine.families.experts import Gating
from weft.engine.kernels.cpu import layers as kernels
from weft.engine.kernels.cpu import recurrent
from weft.engine.kernels.cpu.block_run import fuse
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.packed import PANEL, TILE, Form, Storage, common_form, form_of
from weft.engine.kernels.cpu.products import NativeExperts, supports_experts
from weft.engine.kernels.torch.layer_kernels import TorchKernels
from weft.engine.layers.block import Block, HeadLayer, Layer, Linear
from weft.engine.layers.feed_forward import Experts, ungated
from weft.engine.layers.norm import HeadNorm
from weft.engine.layers.recurrence import CausalConvolution, DeltaRule, SelectiveScan, StateSpace, StateSpaceScan
from weft.engine.layers.wrapped_linear import ActOrderLinear
from weft.engine.weights.groups import packed_in_order
from weft.engine.weights.quantization import Quantization
from weft.engine.weights.reader import ExpertsRef, WeightReader, WeightRef

WeightStorage = Literal["bfloat16", "int8", "int4"]
"""How plain matrices are kept."""

_FORMS = {"int8": Form(bits=8, group=32), "int4": Form(bits=4, group=32, has_offset=True)}
"""What plain weights are rounded to."""


def supports(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels can compute this model."""
    sizes_fit = config.hidden_size % PANEL == 0 and config.head_dim % TILE == 0 and config.intermediate_size % 2 == 0
    return device.type == "cpu" and dtype == torch.bfloat16 and sizes_fit


class CpuKernels(TorchKernels):
    """Weft's kernels, with torch's operations where there is no kernel."""

    keeps_groups = True

    def __init__(
        self, library: NativeLibrary, storage: WeightStorage = "bfloat16", quantization: Quantization | None = None
    ) -> None:
        """Take the functions of a loaded library.

        Args:
            storage: How every matrix is kept.
            quantization: How the checkpoint has its matrices. In bfloat16, those in groups are kept as they are.
        """
        super().__init__(name=f"native{'' if storage == 'bfloat16' else f' {storage}'} ({library.variant})")
        self._storage: Storage = _FORMS.get(storage, "bfloat16")
        self._quantization = quantization if storage == "bfloat16" else None
        self._library = library
        self._forms = kernels.TriedForms(library)

    @override
    def linear_bytes(self, ref: WeightRef, dtype: torch.dtype) -> int:
        return self._bytes(ref, self._stored_form(ref), dtype)

    def _bytes(self, ref: WeightRef, form: Form | None, dtype: torch.dtype) -> int:
        storage = form or self._plain_storage(ref)
        if isinstance(storage, Form):
            bias_bytes = ref.out_features * ref.has_bias * dtype.itemsize
            return storage.num_bytes(ref.out_features, ref.in_features) + bias_bytes
        return super().linear_bytes(ref, dtype)

    @override
    def experts_bytes(self, gate_up: ExpertsRef, down: ExpertsRef, gating: Gating, dtype: torch.dtype) -> int:
        if not supports_experts(gate_up, gating):
            return super().experts_bytes(gate_up, down, gating, dtype)
        return sum(
            ref.num_experts * self._bytes(ref.matrix, self._expert_form(ref.matrix), dtype) for ref in (gate_up, down)
        )

    def _stored_form(self, ref: WeightRef, *, is_expert: bool = False) -> Form | None:
        """That in which a matrix is kept as the checkpoint has it, as far as config.json says; None for plain ones."""
        if self._quantization is None or ref.scales:
            return None
        schemes = self._quantization.kept_schemes(ref.names, in_order=ref.is_cut or is_expert)
        forms = [form for scheme in schemes if (form := form_of(scheme, ref.in_features))]
        form = common_form(forms) if forms and len(forms) == len(schemes) else None
        return None if form is None or self._forms.is_wrong(form) else form

    def _expert_form(self, ref: WeightRef) -> Form | None:
        return self._stored_form(ref, is_expert=True)

    def _plain_storage(self, ref: WeightRef) -> Storage:
        """`storage` of the kernels, but bfloat16 for a matrix whose inputs do not divide into groups."""
        is_broken = isinstance(self._storage, Form) and ref.in_features % self._storage.group != 0
        return "bfloat16" if is_broken else self._storage

    @override
    def linear(self, ref: WeightRef, reader: WeightReader) -> Linear:
        if ref.in_features % 2:  # the kernels take pairs
            return super().linear(ref, reader)
        return self._packed(ref, reader)

    def _packed(
        self, ref: WeightRef, reader: WeightReader, *, gate: str | None = None
    ) -> kernels.NativeLinear | ActOrderLinear:
        if self._storage == "bfloat16":
            groups = reader.groups(ref)
            if groups is not None:
                storage: Storage
                found, order = packed_in_order(groups, self._forms.rows_of)
                storage, weight = found or ("bfloat16", groups.dequantize(torch.bfloat16))
                linear = kernels.NativeLinear(self._library, weight, reader.bias_of(ref), gate=gate, storage=storage)
                return linear if order is None else ActOrderLinear(linear, order)
        return kernels.NativeLinear(self._library, *reader.dense(ref), gate=gate, storage=self._plain_storage(ref))

    @override
    def router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return kernels.NativeLinear(self._library, weight, bias)

    @override
    def experts(self, gate_up: ExpertsRef, down: ExpertsRef, reader: WeightReader, gating: Gating) -> Experts:
        if not supports_experts(gate_up, gating):
            return super().experts(gate_up, down, reader, gating)
        return NativeExperts(
            self._library, gate_up, down, reader, gating, self._plain_storage, self._expert_form, self._forms
        )

    @override
    def gated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        if activation not in kernels.GATES or ref.has_bias:  # too rare for a kernel of its own
            return super().gated(ref, reader, activation)
        return self._packed(ref, reader, gate=activation)

    @override
    def ungated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        linear = self.linear(ref, reader)
        fused = linear.gelu if activation == "gelu" and isinstance(linear, kernels.NativeLinear) else None
        return ungated(linear, activation, fused)

    @override
    def per_head(self, weights: torch.Tensor) -> Layer:
        return kernels.NativePerHead(self._library, weights)

    @override
    def tied(self, ref: WeightRef, reader: WeightReader) -> tuple[Layer, Linear]:
        head = self.linear(ref, reader)
        assert isinstance(head, kernels.NativeLinear), "sizes of hidden states are even"
        return head.gather, head

    @override
    def norm(self, weight: torch.Tensor, eps: float) -> Layer:
        if weight.numel() % PANEL:  # the kernel takes whole vectors
            return super().norm(weight, eps)
        return kernels.NativeNorm(self._library, weight, eps)

    @override
    def layer_norm(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> Layer:
        if weight.dim() > 1 or weight.numel() % PANEL:
            return super().layer_norm(weight, bias, eps)
        return kernels.NativeLayerNorm(self._library, weight, bias, eps)

    @override
    def heads(self, norm: HeadNorm | None, num_heads: int, num_kv_heads: int) -> HeadLayer:
        return kernels.NativeHeads(self._library, norm, num_heads, num_kv_heads)

    @override
    def delta_rule(self) -> DeltaRule:
        return recurrent.NativeDeltaRule(self._library)

    @override
    def convolution(self, weight: torch.Tensor, bias: torch.Tensor | None, *, has_silu: bool) -> CausalConvolution:
        if not recurrent.NativeConvolution.supports(weight):
            return super().convolution(weight, bias, has_silu=has_silu)
        return recurrent.NativeConvolution(self._library, weight, bias, has_silu=has_silu)

    @override
    def state_space(self, space: StateSpace) -> StateSpaceScan:
        return (
            recurrent.NativeStateSpaceScan(self._library, space)
            if recurrent.NativeStateSpaceScan.supports(space)
            else super().state_space(space)
        )

    @override
    def selective_scan(self, decays: torch.Tensor, skips: torch.Tensor, time_bias: torch.Tensor) -> SelectiveScan:
        if not recurrent.NativeSelectiveScan.supports(decays):
            return super().selective_scan(decays, skips, time_bias)
        return recurrent.NativeSelectiveScan(self._library, decays, skips, time_bias)

    @override
    def fuse(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return fuse(self._library, blocks)


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class NativeSampler:
    """Implements `PickIds`; a wrapper of sample.c.

    A row goes from mask to id while it is in the CPU's cache. The result is that of `pick_ids`, but the exponential and
    the order of sums differ in the last bit. So an id may differ if a uniform number is that close to the border
    between two ids. A row's id does not depend on the other rows.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._sample = library.function("weft_sample", _POINTER, _SIZE, _SIZE, *[_POINTER] * 8)

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch, masks: RowMasks | None) -> torch.Tensor:
        """Logits (num_rows, vocab_size) float32, contiguous, which do not change -> ids (num_rows,) int64."""
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        mask_rows = np.full(len(logits), -1)
        if masks is not None:
            mask_rows[masks.rows] = np.arange(len(masks.rows))
        arrays = (mask_rows, batch.temperatures, batch.top_ks, batch.top_ps, batch.min_ps, batch.uniforms)
        self._sample(
            logits.data_ptr(),
            *logits.shape,
            masks.bits.ctypes.data if masks is not None else None,
            *(array.ctypes.data for array in arrays),
            token_ids.data_ptr(),
        )
        return token_ids
