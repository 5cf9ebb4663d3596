"""Layers on CUDA: matrices by cuBLAS, and what lies between two of them in one Triton kernel each.

A layer of most families is eight launches beside attention: two norms, four matrices, the heads, the activation.
The sum with the residual has no launch of its own there: cuBLAS adds it while it writes a matrix's outputs, which moves
less memory than adding it in the norm would. Nothing waits for the device and every shape follows from the inputs', so
that a CUDA graph can hold it all.
"""

import torch
import triton

from weft.engine.kernels.torch.linear import CublasLinear
from weft.engine.kernels.torch.tiled_linear import TiledLinear, forbid_split_sums
from weft.engine.kernels.torch.torch_kit import TorchKit
from weft.engine.kernels.triton import layer_kernels as kernels
from weft.engine.layers.attention import PagedCache
from weft.engine.layers.norm import HeadNorm
from weft.engine.layers.parts import HeadLayer, Layer
from weft.engine.weights.reader import WeightReader
from weft.engine.weights.refs import WeightRef

_HEAD_VALUES = 2048
"""Values of heads that one program prepares: many programs for a single token, few registers each."""

_ACTIVATION_BLOCK = 1024


class TritonKit(TorchKit):
    """torch's kit with kernels between the matrices."""

    def __init__(self, is_deterministic: bool = False) -> None:
        """Compute matrices in fixed tiles if the bits of a row must not depend on the rest of the batch."""
        if is_deterministic:
            forbid_split_sums()
        name = "Triton and cuBLAS" + " in fixed tiles" * is_deterministic
        super().__init__(TiledLinear if is_deterministic else CublasLinear, name)

    def gated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        """See `LayerKit`."""
        gate_up = self.linear(ref, reader)

        def activate(hidden: torch.Tensor) -> torch.Tensor:
            values = gate_up(hidden)  # (num_tokens, 2 * intermediate_size)
            num_tokens, size = values.size(0), values.size(1) // 2
            outputs = values.new_empty(num_tokens, size)
            grid = (num_tokens, triton.cdiv(size, _ACTIVATION_BLOCK))
            kernels.activate[grid](values, outputs, size, activation, _ACTIVATION_BLOCK, num_warps=4)
            return outputs

        return activate

    def norm(self, weight: torch.Tensor, eps: float) -> Layer:
        """See `LayerKit`."""
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

    def heads(self, norm: HeadNorm | None, num_heads: int, num_kv_heads: int) -> HeadLayer:
        """See `LayerKit`."""

        def prepare(
            qkv: torch.Tensor, rotation: torch.Tensor, cache: PagedCache | None
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            num_tokens, _, head_dim = qkv.shape
            num_prepared = num_heads + num_kv_heads * (2 if cache else 1)
            pairs = triton.next_power_of_2(head_dim // 2)
            # Whether there is a cache changes no tile, so that it changes no bit of a sum either.
            heads = min(max(_HEAD_VALUES // (2 * pairs), 1), triton.next_power_of_2(num_heads + 2 * num_kv_heads))
            kernels.prepare_heads[(num_tokens, triton.cdiv(num_prepared, heads))](
                qkv,
                qkv.stride(0),
                rotation,
                norm.weight if norm else qkv,  # what is not there is not read
                norm.eps if norm else 0.0,
                cache.blocks if cache else qkv,
                cache.slots if cache else qkv,
                norm is not None,
                num_heads,
                num_kv_heads,
                head_dim,
                cache.blocks.size(3) if cache else 0,
                heads,
                pairs,
                num_warps=4,
            )
            queries, keys, values = qkv.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
            return queries, keys, values

        return prepare
