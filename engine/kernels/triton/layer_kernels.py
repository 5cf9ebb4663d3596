"""The kernels for CUDA: matrices by cuBLAS, and one Triton kernel for everything between two matrices.

In most families a layer is eight launches besides attention: two norms, four matrices, the heads, the activation. The
sum with the residual needs no launch: cuBLAS adds it as it writes a matrix's outputs, which moves less memory than
adding it in the norm. For few rows the matrices may be Triton's as well (`few_rows`), which leaves five launches: four
matrices, with norms and activation, and the heads. Nothing waits for the device, and all shapes follow from those of
the inputs, so that a CUDA graph can hold a layer.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import triton
from torch import Tensor
from typing_extensions import override

from weft.engine.families.experts import Gating
from weft.engine.kernels.torch import layer_kernels as reference
from weft.engine.kernels.torch.layer_kernels import TiledLinear, TorchKernels, forbid_split_sums
from weft.engine.kernels.triton import layers
from weft.engine.kernels.triton import layers_jit as kernels
from weft.engine.kernels.triton.layers_jit import launch_options
from weft.engine.kernels.triton.packed import Form, PackedMatrix, common_form, form_of, pack
from weft.engine.kernels.triton.products import Fp8Linear, PackedLinear, TritonExperts
from weft.engine.layers.block import Block, HeadLayer, Layer, Linear, PagedCache
from weft.engine.layers.feed_forward import ActivatedLinear, Experts, gated
from weft.engine.layers.norm import HeadNorm
from weft.engine.layers.wrapped_linear import ActOrderLinear
from weft.engine.weights.groups import Storage, packed_in_order, round_matrix
from weft.engine.weights.quantization import Quantization
from weft.engine.weights.reader import ExpertsRef, WeightReader, WeightRef
from weft.engine.wire.errors import ModelError

# Values of heads per program: this gives many programs for a single token, each with few registers.
_HEAD_VALUES = 2048

_STORED: dict[str, Form] = {"int8": Form("int8"), "int4": Form("int4", 32, has_zeros=True), "fp8": Form("fp8")}


class TritonKernels(TorchKernels):
    """torch's kernels with Triton kernels between the matrices, and for few rows in their place."""

    def __init__(
        self,
        is_deterministic: bool = False,
        *,
        few_rows: int = 0,
        is_dependent: bool = False,
        has_own_heads: bool = True,
        has_own_norms: bool = True,
        storage: Storage = "none",
        quantization: Quantization | None = None,
        has_fp8_products: bool = False,
        experts: str | None = None,
    ) -> None:
        """Choose what is computed by Weft's kernels.

        Args:
            is_deterministic: Compute matrices in fixed tiles: a row's bits then do not depend on the batch.
            few_rows: Most rows that `FewRowsLinear` multiplies by its kernel; 0 for none. Not with is_deterministic.
            is_dependent: See `dependent_launch`; ask `supports_dependent_launch` first.
            has_own_heads: Prepare heads by Weft's kernel, as Weft's attention needs it, not by torch.
            has_own_norms: The same for norms and activations, which torch can compute in any case.
            storage: How every plain matrix is kept.
            quantization: How the checkpoint has its matrices, which are kept so, without storage, if the kernels can
                read them; None to dequantize them. Packed matrices are for 16-bit types.
            has_fp8_products: Round many rows to fp8 where the checkpoint was made for that; not with is_deterministic.
            experts: How plain experts are multiplied: by Weft's kernel (triton), by torch expert by expert (torch), or
                by torch's grouped product where it can (None).
        """
        assert not (is_deterministic and few_rows), "the sums of few rows have another order"
        assert has_own_norms or not few_rows, "the products of few rows take norms and activations over"
        if is_deterministic:
            forbid_split_sums()
        name = ("Triton and cuBLAS" if has_own_norms else "cuBLAS") + " in fixed tiles" * is_deterministic
        name += f" for more than {few_rows} rows" * (few_rows > 0)
        name += f", matrices in {storage}" * (storage != "none")
        super().__init__(TiledLinear if is_deterministic else reference.CublasLinear, name)
        self._few_rows = few_rows
        self._is_dependent = is_dependent
        self._has_own_heads = has_own_heads
        self._has_own_norms = has_own_norms
        self._storage = storage
        self._quantization = quantization if storage == "none" else None
        self.keeps_groups = self.keeps_floats = self._quantization is not None
        self.rounds_inputs = has_fp8_products
        self._experts = experts

    @override
    def _matrix(self, weight: Tensor, bias: Tensor | None = None) -> reference.TorchLinear:
        if self._few_rows:
            return layers.FewRowsLinear(weight, bias, self._few_rows, self._is_dependent)
        return super()._matrix(weight, bias)

    def packed_form(self, ref: WeightRef, *, is_expert: bool = False) -> Form | None:
        """How a matrix will be kept, as far as config.json says how the checkpoint has it; None for plain."""
        form = _STORED.get(self._storage)
        if form is not None:
            return form if form.supports(ref.in_features) else None
        if self._quantization is None or ref.scales:
            return None
        sizes = ref.in_features, ref.share.first_input if ref.share else 0
        schemes = self._quantization.kept_schemes(ref.names, in_order=ref.is_cut or is_expert)
        return common_form([form_of(scheme, *sizes) for scheme in schemes]) if schemes else None

    @override
    def linear_bytes(self, ref: WeightRef, dtype: torch.dtype) -> int:
        return self._bytes(ref, self.packed_form(ref), dtype)

    def _bytes(self, ref: WeightRef, form: Form | None, dtype: torch.dtype) -> int:
        if form is None:
            return super().linear_bytes(ref, dtype)
        return form.num_bytes(ref.out_features, ref.in_features) + ref.out_features * ref.has_bias * dtype.itemsize

    @override
    def tied_bytes(self, ref: WeightRef, dtype: torch.dtype) -> int:
        return ref.num_values * dtype.itemsize if self._storage == "none" else self.linear_bytes(ref, dtype)

    @override
    def experts_bytes(self, gate_up: ExpertsRef, down: ExpertsRef, gating: Gating, dtype: torch.dtype) -> int:
        return sum(
            ref.num_experts * self._bytes(ref.matrix, self.packed_form(ref.matrix, is_expert=True), dtype)
            for ref in (gate_up, down)
        )

    @override
    def linear(self, ref: WeightRef, reader: WeightReader) -> Linear:
        return self._packed(ref, reader) or super().linear(ref, reader)

    @override
    def tied(self, ref: WeightRef, reader: WeightReader) -> tuple[Layer, Linear]:
        if self._storage == "none" or self.packed_form(ref) is None:
            return super().tied(ref, reader)
        table, _ = reader.dense(ref)
        head = PackedLinear(self._rounded(table), None, is_deterministic=self._linear is TiledLinear)
        return partial(head.gather, dtype=table.dtype), head

    def _packed(self, ref: WeightRef, reader: WeightReader) -> Linear | None:
        """The matrix in its packed form; None if it is plain."""
        is_deterministic = self._linear is TiledLinear
        if self._storage != "none" and self.packed_form(ref):
            weight, bias = reader.dense(ref)
            return PackedLinear(self._rounded(weight), bias, is_deterministic=is_deterministic)
        if self._quantization is None or self.packed_form(ref) is None:
            return None
        groups, scheme = reader.groups(ref), self._quantization.expected(ref.names[0])
        matrix, order = packed_in_order(groups, pack) if groups else (None, None)
        if matrix is None:
            return None
        if self.rounds_inputs and scheme and scheme.activation_bits == 8 and Fp8Linear.supports(matrix):
            return Fp8Linear(matrix, reader.bias_of(ref))
        linear = PackedLinear(matrix, reader.bias_of(ref), is_deterministic=is_deterministic)
        return linear if order is None else ActOrderLinear(linear, order)

    def _rounded(self, weight: Tensor) -> PackedMatrix:
        matrix = pack(round_matrix(weight, self._storage), _STORED[self._storage])
        assert matrix is not None, "it was rounded to that form"
        return matrix

    def packed_experts(self, ref: ExpertsRef, reader: WeightReader) -> tuple[PackedMatrix, Tensor | None] | None:
        """All experts in one packed matrix, and their biases; None if they are plain.

        Raises:
            ModelError: Some are in another form than the first.
        """
        form = self.packed_form(ref.matrix, is_expert=True)
        if form is None:
            return None
        experts: Iterator[tuple[PackedMatrix | None, Tensor | None]]
        if self._storage != "none":
            experts = ((self._rounded(weight), bias) for weight, bias in reader.experts(ref))
        else:
            stored = reader.expert_groups(ref)
            experts = ((pack(groups, form) if groups else None, bias) for groups, bias in stored)
        first = next(experts)
        if first[0] is None:
            return None
        matrices, biases = first[0].empty_experts(ref.num_experts), []
        for index, (matrix, bias) in enumerate(itertools.chain([first], experts)):
            if matrix is None:
                raise ModelError(f"expert {index} of {ref.matrix.names[0]} is not quantized as the others are")
            matrices.put(index, matrix)
            biases += [] if bias is None else [bias]
        return matrices, torch.stack(biases) if biases else None

    @override
    def experts(self, gate_up: ExpertsRef, down: ExpertsRef, reader: WeightReader, gating: Gating) -> Experts:
        first, last = (self.packed_experts(ref, reader) for ref in (gate_up, down))
        if self._experts == "torch" and first is last is None:
            return super().experts(gate_up, down, reader, gating)
        return TritonExperts(
            *(*(first or reference.stack(gate_up, reader)), *(last or reference.stack(down, reader)), gating),
            is_deterministic=self._linear is TiledLinear,
            is_dependent=self._is_dependent,
            is_grouped=self._experts != "triton",
        )

    @override
    def gated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        gate_up = self.linear(ref, reader)
        if not self._has_own_norms or activation not in layers.OWN_ACTIVATIONS:
            return gated(gate_up, activation)
        activate = layers.GatedActivation(activation, self._is_dependent)
        if isinstance(gate_up, layers.FewRowsLinear):
            return layers.FewRowsGated(gate_up, activate)
        return ActivatedLinear(gate_up, activate)

    @override
    def norm(self, weight: Tensor, eps: float) -> Layer:
        if not self._has_own_norms:
            return super().norm(weight, eps)
        return layers.TritonNorm(weight, eps, self._is_dependent)

    @override
    def fuse(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return layers.fuse_norms(blocks)

    @override
    def heads(self, norm: HeadNorm | None, num_heads: int, num_kv_heads: int) -> HeadLayer:
        if not self._has_own_heads:
            return super().heads(norm, num_heads, num_kv_heads)

        def prepare(qkv: Tensor, rotation: Tensor, cache: PagedCache | None) -> tuple[Tensor, Tensor, Tensor]:
            num_tokens, _, head_dim = qkv.shape
            num_prepared = num_heads + num_kv_heads * (2 if cache else 1)
            pairs = triton.next_power_of_2(head_dim // 2)
            # The tile does not depend on whether there is a cache, so that sums have the same bits in both cases.
            heads = min(max(_HEAD_VALUES // (2 * pairs), 1), triton.next_power_of_2(num_heads + 2 * num_kv_heads))
            kernels.prepare_heads[(num_tokens, triton.cdiv(num_prepared, heads))](
                *(qkv, qkv.stride(0), rotation),
                *((norm.weight, norm.eps) if norm else (qkv, 0.0)),  # an absent tensor is not read
                *(cache or (qkv, qkv, qkv)),
                norm is not None,
                *(num_heads, num_kv_heads, head_dim),
                cache.blocks.size(3) if cache else 0,
                heads,
                pairs,
                num_warps=4,
                **launch_options(self._is_dependent),
            )
            queries, keys, values = qkv.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
            return queries, keys, values

        return prepare
