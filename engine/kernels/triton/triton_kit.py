"""The kit for CUDA: matrices by cuBLAS, and one Triton kernel for everything between two matrices.

In most families a layer is eight launches besides attention: two norms, four matrices, the heads, the activation. The
sum with the residual needs no launch: cuBLAS adds it as it writes a matrix's outputs, which moves less memory than
adding it in the norm. For few rows the matrices may be Triton's as well (`few_rows`), which leaves five launches: four
matrices, with norms and activation, and the heads. Nothing waits for the device, and all shapes follow from those of
the inputs, so that a CUDA graph can hold a layer.
"""

from collections.abc import Sequence

import torch
import triton
from typing_extensions import override

from weft.engine.kernels.torch.linear import CublasLinear, TiledLinear, TorchLinear, forbid_split_sums
from weft.engine.kernels.torch.torch_kit import TorchKit, stack
from weft.engine.kernels.triton import layer_kernels as kernels
from weft.engine.kernels.triton.dependent_launch import launch_options
from weft.engine.kernels.triton.experts import TritonExperts
from weft.engine.kernels.triton.few_rows import FewRowsGated, FewRowsLinear, fuse_norms
from weft.engine.kernels.triton.layers import OWN_ACTIVATIONS, GatedActivation, TritonNorm
from weft.engine.layers.attention import PagedCache
from weft.engine.layers.block import Block
from weft.engine.layers.experts import Experts
from weft.engine.layers.gated import ActivatedLinear
from weft.engine.layers.norm import HeadNorm
from weft.engine.layers.parts import HeadLayer, Layer
from weft.engine.layers.routing import Gating
from weft.engine.weights.formats import WeightReader
from weft.engine.weights.refs import ExpertsRef, WeightRef

# Values of heads per program: this gives many programs for a single token, each with few registers.
_HEAD_VALUES = 2048


class TritonKit(TorchKit):
    """torch's kit with Triton kernels between the matrices, and for few rows in their place."""

    def __init__(
        self,
        is_deterministic: bool = False,
        *,
        few_rows: int = 0,
        is_dependent: bool = False,
        has_own_heads: bool = True,
        has_own_norms: bool = True,
    ) -> None:
        """Choose what is computed by Weft's kernels.

        Args:
            is_deterministic: Compute matrices in fixed tiles: a row's bits then do not depend on the batch.
            few_rows: Most rows that `FewRowsLinear` multiplies by its kernel; 0 for none. Not with is_deterministic.
            is_dependent: See `dependent_launch`; ask `supports_dependent_launch` first.
            has_own_heads: Prepare heads by Weft's kernel, as Weft's attention needs it, not by torch.
            has_own_norms: The same for norms and activations, which torch can compute in any case.
        """
        assert not (is_deterministic and few_rows), "the sums of few rows have another order"
        assert has_own_norms or not few_rows, "the products of few rows take norms and activations over"
        if is_deterministic:
            forbid_split_sums()
        name = ("Triton and cuBLAS" if has_own_norms else "cuBLAS") + " in fixed tiles" * is_deterministic
        name += f" for more than {few_rows} rows" * (few_rows > 0)
        super().__init__(TiledLinear if is_deterministic else CublasLinear, name)
        self._few_rows = few_rows
        self._is_dependent = is_dependent
        self._has_own_heads = has_own_heads
        self._has_own_norms = has_own_norms

    @override
    def _matrix(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> TorchLinear:
        if self._few_rows:
            return FewRowsLinear(weight, bias, self._few_rows, self._is_dependent)
        return super()._matrix(weight, bias)

    @override
    def experts(self, gate_up: ExpertsRef, down: ExpertsRef, reader: WeightReader, gating: Gating) -> Experts:
        return TritonExperts(
            *(*stack(gate_up, reader), *stack(down, reader), gating),
            is_deterministic=self._linear is TiledLinear,
            is_dependent=self._is_dependent,
        )

    @override
    def gated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        if not self._has_own_norms or activation not in OWN_ACTIVATIONS:
            return super().gated(ref, reader, activation)
        gate_up = self._matrix(*reader.dense(ref))
        activate = GatedActivation(activation, self._is_dependent)
        if isinstance(gate_up, FewRowsLinear):
            return FewRowsGated(gate_up, activate)
        return ActivatedLinear(gate_up, activate)

    @override
    def norm(self, weight: torch.Tensor, eps: float) -> Layer:
        if not self._has_own_norms:
            return super().norm(weight, eps)
        return TritonNorm(weight, eps, self._is_dependent)

    @override
    def fuse(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return fuse_norms(blocks)

    @override
    def heads(self, norm: HeadNorm | None, num_heads: int, num_kv_heads: int) -> HeadLayer:
        if not self._has_own_heads:
            return super().heads(norm, num_heads, num_kv_heads)

        def prepare(
            qkv: torch.Tensor, rotation: torch.Tensor, cache: PagedCache | None
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            num_tokens, _, head_dim = qkv.shape
            num_prepared = num_heads + num_kv_heads * (2 if cache else 1)
            pairs = triton.next_power_of_2(head_dim // 2)
            # The tile does not depend on whether there is a cache, so that sums have the same bits in both cases.
            heads = min(max(_HEAD_VALUES // (2 * pairs), 1), triton.next_power_of_2(num_heads + 2 * num_kv_heads))
            kernels.prepare_heads[(num_tokens, triton.cdiv(num_prepared, heads))](
                *(qkv, qkv.stride(0), rotation),
                *((norm.weight, norm.eps) if norm else (qkv, 0.0)),  # an absent tensor is not read
                *((cache.blocks, cache.slots) if cache else (qkv, qkv)),
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
