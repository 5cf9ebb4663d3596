"""The kit that computes layers with torch's own operations, on any device."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.kernels.torch.experts import TorchExperts
from weft.engine.kernels.torch.linear import OnednnLinear, TiledLinear, TorchLinear, forbid_split_sums
from weft.engine.layers.attention import PagedCache
from weft.engine.layers.block import Block
from weft.engine.layers.convolution import CausalConvolution
from weft.engine.layers.delta_rule import DeltaRule, delta_rule
from weft.engine.layers.experts import Experts
from weft.engine.layers.gated import gated, ungated
from weft.engine.layers.kit import LayerKit
from weft.engine.layers.norm import HeadNorm, LayerNorm, RMSNorm
from weft.engine.layers.parts import HeadLayer, Layer, Linear
from weft.engine.layers.rotary import rotate
from weft.engine.layers.routing import Gating
from weft.engine.layers.selective_scan import SelectiveScan
from weft.engine.layers.state_space import StateSpace, StateSpaceScan
from weft.engine.weights.formats import WeightReader
from weft.engine.weights.refs import ExpertsRef, WeightRef

_KIT_NAMES = {
    TorchLinear: "torch",
    OnednnLinear: "torch with oneDNN",
    TiledLinear: "torch in fixed tiles",
}


class TorchKit(LayerKit):
    """torch's operations, with one class of matrices."""

    def __init__(self, linear: type[TorchLinear] = TorchLinear, name: str | None = None) -> None:
        """OneDNN's linear layer needs bfloat16 and a CPU with bfloat16 instructions. The name is for the log."""
        self.name = name or _KIT_NAMES[linear]
        self._linear = linear

    @override
    def linear_bytes(self, ref: WeightRef, dtype: torch.dtype) -> int:
        return ref.num_values * dtype.itemsize

    @override
    def tied_bytes(self, ref: WeightRef, dtype: torch.dtype) -> int:
        return self.linear_bytes(ref, dtype) * (2 if self._tied_linear(dtype) is OnednnLinear else 1)

    @override
    def experts_bytes(self, gate_up: ExpertsRef, down: ExpertsRef, gating: Gating, dtype: torch.dtype) -> int:
        return (gate_up.num_values + down.num_values) * dtype.itemsize

    @override
    def linear(self, ref: WeightRef, reader: WeightReader) -> Linear:
        return self._matrix(*reader.dense(ref))

    def _matrix(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> TorchLinear:
        return self._linear(weight, bias)

    @override
    def router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._matrix(weight, bias)

    @override
    def experts(self, gate_up: ExpertsRef, down: ExpertsRef, reader: WeightReader, gating: Gating) -> Experts:
        return TorchExperts(*stack(gate_up, reader), *stack(down, reader), gating)

    @override
    def gated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        return gated(self.linear(ref, reader), activation)

    @override
    def ungated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        linear = self.linear(ref, reader)
        fused = linear.gelu if activation == "gelu" and isinstance(linear, OnednnLinear) else None
        return ungated(linear, activation, fused)

    @override
    def per_head(self, weights: torch.Tensor) -> Layer:
        if self._linear is TiledLinear:
            matrices = [TiledLinear(weight) for weight in weights]
            return lambda heads: torch.stack(
                [matrix(head) for matrix, head in zip(matrices, heads.unbind(1), strict=True)], 1
            )
        transposed = weights.contiguous().transpose(1, 2)
        return lambda heads: torch.bmm(heads.transpose(0, 1), transposed).transpose(0, 1)

    @override
    def embedding(self, ref: WeightRef, reader: WeightReader) -> Layer:
        return partial(F.embedding, weight=reader.dense(ref)[0])

    @override
    def tied(self, ref: WeightRef, reader: WeightReader) -> tuple[Layer, Linear]:
        table, _ = reader.dense(ref)
        linear = self._tied_linear(table.dtype)
        head = self._matrix(table) if linear is self._linear else linear(table)
        return partial(F.embedding, weight=table), head

    def _tied_linear(self, dtype: torch.dtype) -> type[TorchLinear]:
        """For a head that shares its matrix: oneDNN's layout is a copy, in float32 not worth the memory."""
        return TorchLinear if self._linear is OnednnLinear and dtype == torch.float32 else self._linear

    @override
    def norm(self, weight: torch.Tensor, eps: float) -> Layer:
        return RMSNorm(weight, eps)

    @override
    def layer_norm(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> Layer:
        return LayerNorm(weight, bias, eps)

    @override
    def heads(self, norm: HeadNorm | None, num_heads: int, num_kv_heads: int) -> HeadLayer:
        def prepare(
            qkv: torch.Tensor, rotation: torch.Tensor, cache: PagedCache | None
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            assert cache is None, "this kit leaves writing K/V to the attention backend"
            # Norm and rotation take queries and keys as one tensor: half as many operations.
            heads, values = qkv.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
            heads = rotate(norm(heads) if norm else heads, rotation)
            queries, keys = heads.split_with_sizes((num_heads, num_kv_heads), dim=1)
            return queries, keys, values

        return prepare

    @override
    def delta_rule(self) -> DeltaRule:
        return delta_rule

    @override
    def convolution(self, weight: torch.Tensor, bias: torch.Tensor | None, *, has_silu: bool) -> CausalConvolution:
        return CausalConvolution(weight, bias, has_silu=has_silu)

    @override
    def state_space(self, space: StateSpace) -> StateSpaceScan:
        return StateSpaceScan(space)

    @override
    def selective_scan(self, decays: torch.Tensor, skips: torch.Tensor, time_bias: torch.Tensor) -> SelectiveScan:
        return SelectiveScan(decays, skips, time_bias)

    @override
    def fuse(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return blocks


def stack(ref: ExpertsRef, reader: WeightReader) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All experts in one tensor (num_experts, out_features, in_features), and their biases."""
    stacked: list[torch.Tensor] = []
    for index, expert in enumerate(reader.experts(ref)):
        for part, values in enumerate(values for values in expert if values is not None):
            if index == 0:
                stacked.append(values.new_empty(ref.num_experts, *values.shape))
            stacked[part][index] = values
    return stacked[0], stacked[1] if ref.matrix.has_bias else None


def torch_kit(device: torch.device, dtype: torch.dtype, is_deterministic: bool = False) -> TorchKit:
    """The fastest such kit: with fixed tiles if deterministic, with oneDNN if the CPU has instructions for dtype."""
    if is_deterministic:
        forbid_split_sums()
        return TorchKit(TiledLinear)
    return TorchKit(OnednnLinear if device.type == "cpu" and _has_onednn(dtype) else TorchLinear)


def _has_onednn(dtype: torch.dtype) -> bool:
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn:
        return False
    if dtype == torch.float32:
        return torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
