"""The protocol of what makes the layers of a model for one device and dtype, and the layers of experts among them.

`LayerKernels` reads the weights that a reference names and makes layers of them. It decides what stays in memory: plain
tensors, or packed ones, after which the plain tensors are freed.

In a mixture of experts, a router chooses a few of many small feed-forward networks for each token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from typing_extensions import override

from weft.engine.families.experts import Gating, Routing
from weft.engine.layers.block import Block, FeedForward, HeadLayer, Layer, Linear
from weft.engine.layers.gated import ACTIVATIONS
from weft.engine.layers.norm import HeadNorm
from weft.engine.layers.recurrence import CausalConvolution, DeltaRule, SelectiveScan, StateSpace, StateSpaceScan
from weft.engine.weights.reader import ExpertsRef, WeightReader, WeightRef


class Experts(Protocol):
    """The experts of a layer, made by `LayerKernels`. No expert computes other tokens than its own."""

    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> None:
        """Add the outputs of each token's experts, each times its share, in place.

        Args:
            residual: (num_tokens, hidden_size).
            inputs: (num_tokens, hidden_size).
            ids: (num_tokens, num_chosen), int64.
            shares: (num_tokens, num_chosen), float32.
        """


@dataclass(frozen=True, slots=True)
class ScaledInputs(Experts):
    """Experts whose shares count before them: each reads the inputs times its share, and its outputs count in full."""

    experts: Experts

    @override
    def add_to(self, residual: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> None:
        for index in range(ids.size(1)):
            chosen, share = ids[:, index : index + 1], shares[:, index : index + 1]
            self.experts.add_to(residual, inputs * share.to(inputs.dtype), chosen, torch.ones_like(share))


@dataclass(frozen=True, slots=True)
class ExpertLayer(FeedForward):
    """A router, its experts, and a feed-forward layer for all tokens beside them, if any.

    Attributes:
        router: (num_experts, hidden_size).
        bias: See `Routing.choose`.
        shared: For all tokens; None if there is none.
        epilogue: What the sum of all outputs goes through before it is added; None for nothing.
    """

    router: Linear
    routing: Routing
    experts: Experts
    bias: torch.Tensor | None = None
    shared: FeedForward | None = None
    epilogue: Layer | None = None

    @override
    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        if self.epilogue is None:
            self._add_outputs(residual, normed)
            return
        outputs = torch.zeros_like(residual)
        self._add_outputs(outputs, normed)
        residual += self.epilogue(outputs)

    def _add_outputs(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        ids, shares = self.routing.choose(self.router.to_float32(normed), self.bias)
        self.experts.add_to(residual, normed, ids, shares)
        if self.shared is not None:
            self.shared.add_to(residual, normed)


@dataclass(frozen=True, slots=True)
class SharedExpert(FeedForward):
    """A feed-forward layer whose outputs count by the sigmoid of a gate, (1, hidden_size)."""

    gate: Linear
    forward: FeedForward

    @override
    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        outputs = torch.zeros_like(residual)
        self.forward.add_to(outputs, normed)
        residual.addcmul_(outputs, torch.sigmoid(self.gate(normed)))


def join(gating: Gating, values: torch.Tensor) -> torch.Tensor:
    """Values between the matrices, (num_rows, num_parts * inner size), gate first -> (num_rows, inner size)."""
    activate = ACTIVATIONS[gating.activation]
    if not gating.has_gate:
        return activate(values)
    gate, up = values.chunk(2, dim=-1)
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    gate = activate(gate) if gating.slope == 1.0 else gate * torch.sigmoid(gating.slope * gate)
    return gate * (up + gating.up_offset if gating.up_offset else up)


class LayerKernels(Protocol):
    """Makes the layers of one model."""

    name: str
    keeps_groups: bool = False
    """Whether matrices that a checkpoint has as integers in groups stay so in memory."""
    keeps_floats: bool = False
    """The same for fp8 and fp4 of any published form; integers are then kept, too."""
    rounds_inputs: bool = False
    """Whether many rows are rounded to fp8 where a checkpoint was made for that."""

    def linear_bytes(self, ref: WeightRef, dtype: torch.dtype) -> int:
        """Bytes of memory that the result of `linear` takes."""

    def tied_bytes(self, ref: WeightRef, dtype: torch.dtype) -> int:
        """Bytes of memory that the result of `tied` takes."""

    def experts_bytes(self, gate_up: ExpertsRef, down: ExpertsRef, gating: Gating, dtype: torch.dtype) -> int:
        """Bytes of memory that the result of `experts` takes."""

    def linear(self, ref: WeightRef, reader: WeightReader) -> Linear:
        """A matrix with its bias."""

    def router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A matrix that stays as it is where others are quantized."""

    def experts(self, gate_up: ExpertsRef, down: ExpertsRef, reader: WeightReader, gating: Gating) -> Experts:
        """Gate and up projection, gate first, and down projection of all experts of a layer."""

    def gated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        """Two projections of one size, gate first -> activation(gate(x)) * up(x)."""

    def ungated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        """One projection -> activation(up(x))."""

    def per_head(self, weights: torch.Tensor) -> Layer:
        """A matrix (n, k) for each head, stacked: (num_tokens, num_heads, k) -> (num_tokens, num_heads, n)."""

    def embedding(self, ref: WeightRef, reader: WeightReader) -> Layer:
        """Token ids (num_tokens,) -> rows of the matrix (vocab_size, hidden_size)."""

    def tied(self, ref: WeightRef, reader: WeightReader) -> tuple[Layer, Linear]:
        """Embedding and output head that share one matrix (vocab_size, hidden_size)."""

    def norm(self, weight: torch.Tensor, eps: float) -> Layer:
        """RMSNorm over the last dimension; weight may be float32 for hidden states of another dtype."""

    def layer_norm(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> Layer:
        """LayerNorm of hidden states; see `LayerNorm`."""

    def heads(self, norm: HeadNorm | None, num_heads: int, num_kv_heads: int) -> HeadLayer:
        """Norm of queries and keys, unless norm is None, then rotary embedding."""

    def delta_rule(self) -> DeltaRule:
        """Linear attention."""

    def convolution(self, weight: torch.Tensor, bias: torch.Tensor | None, *, has_silu: bool) -> CausalConvolution:
        """A convolution with weight (channels, kernel) and bias (channels,)."""

    def state_space(self, space: StateSpace) -> StateSpaceScan:
        """A state space of Mamba 2."""

    def selective_scan(self, decays: torch.Tensor, skips: torch.Tensor, time_bias: torch.Tensor) -> SelectiveScan:
        """See `SelectiveScan`."""

    def fuse(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """The same computation in fewer blocks, if the kernels that made them can run several in one call."""
