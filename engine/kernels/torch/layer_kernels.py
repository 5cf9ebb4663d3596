"""torch's operations as kernels of a model, on any device: layers, experts, low-rank adapters and sampling.

They are the reference that Weft's own kernels are compared with, and serve where there is none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from weft.engine.batch import Floats, Ints, RowMasks, SamplingBatch
from weft.engine.device import to_device
from weft.engine.families.experts import Gating
from weft.engine.layers import recurrence
from weft.engine.layers.block import Block, HeadLayer, Layer, Linear, PagedCache
from weft.engine.layers.feed_forward import Experts, gated, join, ungated
from weft.engine.layers.kernels import LayerKernels
from weft.engine.layers.norm import HeadNorm, LayerNorm, RMSNorm
from weft.engine.layers.recurrence import CausalConvolution, SelectiveScan
from weft.engine.layers.rotary import rotate
from weft.engine.lora.adapted_layers import Delta, Site, StepRows
from weft.engine.sampling.edits import apply_penalties
from weft.engine.sampling.sampler import SamplingKernels
from weft.engine.weights.reader import ExpertsRef, WeightReader, WeightRef


class TorchLinear(Linear):
    """torch's own linear layer."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take weight (out_features, in_features) and bias (out_features,), None if there is none."""
        self.weight = weight
        self.bias = bias

    @override
    def __call__(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight, self.bias)

    @override
    def add_to(self, residual: Tensor, inputs: Tensor) -> None:
        residual += self(inputs)

    @override
    def to_float32(self, inputs: Tensor) -> Tensor:
        return self(inputs).float()


class CublasLinear(TorchLinear):
    """Lets cuBLAS add the residual or write float32 itself, without a second pass and without rounding in between."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Keep the transposed view, which a call need not make then."""
        super().__init__(weight, bias)
        self._transposed = weight.t()

    @override
    def add_to(self, residual: Tensor, inputs: Tensor) -> None:
        residual.addmm_(inputs, self._transposed)
        if self.bias is not None:
            residual += self.bias

    @override
    def to_float32(self, inputs: Tensor) -> Tensor:
        if self.bias is not None or inputs.dtype == torch.float32 or not inputs.is_cuda:  # torch widens on CUDA only
            return super().to_float32(inputs)
        return torch.mm(inputs, self._transposed, out_dtype=torch.float32)


class OnednnLinear(TorchLinear):
    """A weight in oneDNN's blocked layout: bfloat16 streams from memory almost twice as fast for a few rows.

    In float32 its products of many rows take four fifths of the time of torch's own library on AMD's processors.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy weight (out_features, in_features) into the blocked layout."""
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight), bias)

    @override
    def __call__(self, inputs: Tensor) -> Tensor:
        return self._run(inputs, "none")

    def gelu(self, inputs: Tensor) -> Tensor:
        """The GELU of the outputs."""
        return self._run(inputs, "gelu")

    def _run(self, inputs: Tensor, activation: str) -> Tensor:
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, activation, [], "none")
        return outputs


ROW_TILE = 128
"""Rows of a tile. With fewer, reading the weights takes longer than the arithmetic that padding adds."""


class TiledLinear(TorchLinear):
    """torch's linear layer in fixed tiles of rows, for `--deterministic` on CUDA.

    A row's result does not depend on the number of rows. cuBLAS chooses its kernel, and with it the order in which a
    row is summed, by the shape of the product. So every product has one shape: tiles of ROW_TILE rows, the last one
    padded. Sums that are split over the inner dimension may differ from tile to tile, so they are switched off
    (`forbid_split_sums`).
    """

    @override
    def __call__(self, inputs: Tensor) -> Tensor:
        num_tokens = len(inputs)
        padded = F.pad(inputs, (0, 0, 0, -num_tokens % ROW_TILE))
        outputs = padded.new_empty(len(padded), len(self.weight))
        for tile, target in zip(torch.split(padded, ROW_TILE), torch.split(outputs, ROW_TILE), strict=True):
            torch.mm(tile, self.weight.t(), out=target)
        if self.bias is not None:
            outputs += self.bias
        return outputs[:num_tokens]


def forbid_split_sums() -> None:
    """Let cuBLAS sum every row in one piece. Only cuBLASLt takes this setting, and only for 16-bit types."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = (False, False)


@dataclass(eq=False)
class TorchExperts(Experts):
    """Experts: the rows of one after those of another. Waits for the device.

    Attributes:
        gate_up: (num_experts, num_parts * size, hidden_size).
        down: (num_experts, hidden_size, size).
        gate_up_bias, down_bias: The first two dimensions of their matrices; None without.
    """

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    gating: Gating

    @override
    def add_to(self, residual: Tensor, inputs: Tensor, ids: Tensor, shares: Tensor) -> None:
        pairs = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=len(self.gate_up)).tolist()
        sums = torch.zeros_like(residual, dtype=torch.float32)
        for expert, chosen in enumerate(torch.split(pairs, counts)):
            if len(chosen):
                rows = chosen // ids.size(1)
                outputs = self._compute(expert, inputs[rows])
                sums.index_add_(0, rows, outputs * shares.flatten()[chosen].unsqueeze(1))
        residual += sums

    def _compute(self, expert: int, inputs: Tensor) -> Tensor:
        return self.second(expert, join(self.gating, self.first(expert, inputs)))

    def first(self, expert: int, inputs: Tensor) -> Tensor:
        """What gate and up projection of an expert make, gate first."""
        bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
        return F.linear(inputs, self.gate_up[expert], bias)

    def second(self, expert: int, inner: Tensor) -> Tensor:
        """What its down projection makes."""
        return F.linear(inner, self.down[expert], None if self.down_bias is None else self.down_bias[expert])


_NAMES = {TorchLinear: "torch", OnednnLinear: "torch with oneDNN", TiledLinear: "torch in fixed tiles"}


class TorchKernels(LayerKernels):
    """Makes layers of torch's operations, with one class of matrices."""

    def __init__(self, linear: type[TorchLinear] = TorchLinear, name: str | None = None) -> None:
        """OneDNN's linear layer needs bfloat16 and a CPU with bfloat16 instructions. The name is for the log."""
        self.name = name or _NAMES[linear]
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

    def _matrix(self, weight: Tensor, bias: Tensor | None = None) -> TorchLinear:
        return self._linear(weight, bias)

    @override
    def router(self, weight: Tensor, bias: Tensor | None) -> Linear:
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
    def per_head(self, weights: Tensor) -> Layer:
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
    def norm(self, weight: Tensor, eps: float) -> Layer:
        return RMSNorm(weight, eps)

    @override
    def layer_norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> Layer:
        return LayerNorm(weight, bias, eps)

    @override
    def heads(self, norm: HeadNorm | None, num_heads: int, num_kv_heads: int) -> HeadLayer:
        def prepare(qkv: Tensor, rotation: Tensor, cache: PagedCache | None) -> tuple[Tensor, Tensor, Tensor]:
            assert cache is None, "these kernels leave writing K/V to the attention backend"
            # Norm and rotation take queries and keys as one tensor: half as many operations.
            heads, values = qkv.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
            heads = rotate(norm(heads) if norm else heads, rotation)
            queries, keys = heads.split_with_sizes((num_heads, num_kv_heads), dim=1)
            return queries, keys, values

        return prepare

    @override
    def delta_rule(self) -> recurrence.DeltaRule:
        return recurrence.delta_rule

    @override
    def convolution(self, weight: Tensor, bias: Tensor | None, *, has_silu: bool) -> CausalConvolution:
        return CausalConvolution(weight, bias, has_silu=has_silu)

    @override
    def state_space(self, space: recurrence.StateSpace) -> recurrence.StateSpaceScan:
        return recurrence.StateSpaceScan(space)

    @override
    def selective_scan(self, decays: Tensor, skips: Tensor, time_bias: Tensor) -> SelectiveScan:
        return SelectiveScan(decays, skips, time_bias)

    @override
    def fuse(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return blocks


def stack(ref: ExpertsRef, reader: WeightReader) -> tuple[Tensor, Tensor | None]:
    """All experts in one tensor (num_experts, out_features, in_features), and their biases."""
    stacked: list[Tensor] = []
    for index, expert in enumerate(reader.experts(ref)):
        for part, values in enumerate(values for values in expert if values is not None):
            if index == 0:
                stacked.append(values.new_empty(ref.num_experts, *values.shape))
            stacked[part][index] = values
    return stacked[0], stacked[1] if ref.matrix.has_bias else None


def torch_kernels(device: torch.device, dtype: torch.dtype, is_deterministic: bool = False) -> TorchKernels:
    """The fastest of them: with fixed tiles if deterministic, with oneDNN if the CPU has instructions for dtype."""
    if is_deterministic:
        forbid_split_sums()
        return TorchKernels(TiledLinear)
    return TorchKernels(OnednnLinear if device.type == "cpu" and _has_onednn(dtype) else TorchLinear)


def _has_onednn(dtype: torch.dtype) -> bool:
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn:
        return False
    if dtype == torch.float32:
        return torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class TorchSite(Site):
    """Low-rank adapters, one after another."""

    def __init__(self, num_reserved_bytes: int) -> None:
        """Begin without adapters."""
        self.num_reserved_bytes = num_reserved_bytes
        self._deltas: dict[int, Sequence[Delta]] = {}

    @override
    def put(self, slot: int, deltas: Sequence[Delta]) -> None:
        self._deltas[slot] = deltas

    @override
    def add(self, outputs: Tensor, inputs: Tensor, rows: StepRows) -> None:
        for slot, places in rows.by_slot:
            deltas = self._deltas.get(slot, ())
            chosen = inputs[places] if deltas else inputs
            for first, a, b in deltas:
                added = F.linear(F.linear(chosen, a), b).to(outputs.dtype)
                outputs[:, first : first + len(b)].index_add_(0, places, added)


def pick_ids(logits: Tensor, batch: SamplingBatch, masks: RowMasks | None) -> Tensor:
    """A `PickIds` for any device: temperature, filters and the draw, written plainly."""
    if masks is not None:
        masks.apply(logits)
    token_ids = logits.argmax(-1)  # the lowest id among equals
    if batch.temperatures.any():
        is_random = to_device(batch.temperatures, logits.device) > 0
        token_ids = torch.where(is_random, _draw(logits, batch, token_ids), token_ids)
    if masks is not None:
        masks.withdraw(token_ids, masks.are_empty(logits))
    return token_ids


TORCH_SAMPLING = SamplingKernels(apply_penalties, pick_ids)
"""For any device."""


def _draw(logits: Tensor, batch: SamplingBatch, best: Tensor) -> Tensor:
    """Steps 5 to 8 for every row, those of temperature 0 as well; best: (num_rows,) ids of the largest logits."""

    def column(values: Floats) -> Tensor:
        return to_device(values, logits.device)[:, None]

    # The lower bound keeps rows where everything is banned from -inf - -inf = NaN.
    maxima = logits.gather(-1, best[:, None]).clamp(min=torch.finfo(torch.float32).min)  # (num_rows, 1)
    # Relative to the largest logit first, so that no temperature overflows.
    temperatures = column(np.where(batch.temperatures > 0, batch.temperatures, np.float32(1)))
    weights = logits.sub(maxima).div_(temperatures).exp_()
    weights.scatter_(-1, best[:, None], 1.0)  # true already, but where everything is banned
    if batch.top_ks.any() or batch.min_ps.any() or (batch.top_ps < 1).any():
        weights.mul_(weights >= weight_floors(weights, batch.top_ks, batch.top_ps, batch.min_ps))
    return draw(weights, column(batch.uniforms))


def weight_floors(weights: Tensor, top_ks: Ints, top_ps: Floats, min_ps: Floats) -> Tensor:
    """The smallest weight that each row's filters keep.

    top-p keeps the fewest ids, by falling weight, that reach top_p of what min-p and top-k leave, and always the most
    probable one. Holtzman et al., "The curious case of neural text degeneration", 2020.

    A floor is one of the row's own weights, or min-p, and ids of at least that weight are kept. So ids that tie are
    kept or dropped together, and neither the order of a sort nor the other rows of the batch matter. Sorts whole rows,
    which Weft's own samplers do not.

    Args:
        weights: (num_rows, vocab_size) float32; the largest of each row is 1.
        top_ks: (num_rows,) 0 keeps all.
        top_ps: (num_rows,) 1 keeps all.
        min_ps: (num_rows,) 0 keeps all.

    Returns:
        (num_rows, 1) float32.
    """
    device, vocab_size = weights.device, weights.shape[-1]
    last_kept = np.where(top_ks > 0, np.minimum(top_ks, vocab_size), vocab_size) - 1
    top_p = to_device(top_ps, device)[:, None]
    falling = weights.sort(-1, descending=True).values
    kth = falling.gather(-1, to_device(last_kept, device)[:, None])
    floors = torch.maximum(kth, to_device(min_ps, device)[:, None])
    masses = (falling * (falling >= floors)).cumsum(-1, dtype=torch.float64)
    num_before = (masses < top_p * masses[:, -1:]).sum(-1, keepdim=True)  # ids that do not reach the nucleus' mass
    nucleus = falling.gather(-1, num_before.clamp(max=vocab_size - 1))
    return torch.where(top_p < 1, torch.maximum(floors, nucleus), floors)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first id in vocabulary order whose cumulated weight exceeds uniform * total, so never one of weight 0.

    Args:
        weights: (num_rows, vocab_size) float32 >= 0, not normalised, with a positive total.
        uniforms: (num_rows, 1) float32 in [0, 1).

    Returns:
        (num_rows,) int64; ids are in range even when a row is full of NaN.
    """
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    ids = torch.searchsorted(cumulated, uniforms.to(torch.float64) * cumulated[:, -1:], right=True)
    return ids[:, 0].clamp(max=weights.shape[-1] - 1)
