"""The kit for CUDA: matrices by cuBLAS, and one Triton kernel for everything between two matrices.

In most families a layer is eight launches besides attention: two norms, four matrices, the heads, the activation. The
sum with the residual needs no launch: cuBLAS adds it as it writes a matrix's outputs, which moves less memory than
adding it in the norm. Nothing waits for the device, and all shapes follow from those of the inputs, so that a CUDA
graph can hold a layer.
"""

import torch
import triton
from typing_extensions import override

from weft.engine.kernels.torch.linear import CublasLinear, TiledLinear, forbid_split_sums
from weft.engine.kernels.torch.torch_kit import TorchKit
from weft.engine.kernels.triton import layer_kernels as kernels
from weft.engine.layers.attention import PagedCache
from weft.engine.layers.norm import HeadNorm
from weft.engine.layers.parts import HeadLayer, Layer
from weft.engine.weights.formats import WeightReader
from weft.engine.weights.refs import WeightRef

# Values of heads per program: this gives many programs for a single token, each with few registers.
_HEAD_VALUES = 2048
_ACTIVATION_BLOCK = 1024


class TritonKit(TorchKit):
    """torch's kit with Triton kernels between the matrices."""

    def __init__(
        self, is_deterministic: bool = False, *, has_own_heads: bool = True, has_own_norms: bool = True
    ) -> None:
        """Choose what is computed by Weft's kernels.

        Args:
            is_deterministic: Compute matrices in fixed tiles: a row's bits then do not depend on the batch.
            has_own_heads: Prepare heads by Weft's kernel, as Weft's attention needs it, not by torch.
            has_own_norms: The same for norms and activations, which torch can compute in any case.
        """
        if is_deterministic:
            forbid_split_sums()
        name = ("Triton and cuBLAS" if has_own_norms else "cuBLAS") + " in fixed tiles" * is_deterministic
        super().__init__(TiledLinear if is_deterministic else CublasLinear, name)
        self._has_own_heads = has_own_heads
        self._has_own_norms = has_own_norms

    @override
    def gated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        if not self._has_own_norms:
            return super().gated(ref, reader, activation)
        gate_up = self.linear(ref, reader)

        def activate(hidden: torch.Tensor) -> torch.Tensor:
            values = gate_up(hidden)  # (num_tokens, 2 * intermediate_size)
            num_tokens, size = values.size(0), values.size(1) // 2
            outputs = values.new_empty(num_tokens, size)
            grid = (num_tokens, triton.cdiv(size, _ACTIVATION_BLOCK))
            kernels.activate[grid](values, outputs, size, activation, _ACTIVATION_BLOCK, num_warps=4)
            return outputs

        return activate

    @override
    def norm(self, weight: torch.Tensor, eps: float) -> Layer:
        if not self._has_own_norms:
            return super().norm(weight, eps)
        block = triton.next_power_of_2(len(weight))
        num_warps = min(max(block // 512, 1), 16)

        def normalise(hidden: torch.Tensor) -> torch.Tensor:
            num_rows, size = hidden.shape
            outputs = hidden.new_empty(num_rows, size)
            kernels.rms_norm[(num_rows,)](
                hidden, weight, outputs, size, hidden.stride(0), eps, block, num_warps=num_warps
            )
            return outputs

        return normalise

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
            )
            queries, keys, values = qkv.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
            return queries, keys, values

        return prepare
