"""The protocol of what makes the layers of a model for one device and dtype.

`LayerKernels` reads the weights that a reference names and makes layers of them. It decides what stays in memory: plain
tensors, or packed ones, after which the plain tensors are freed.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from weft.engine.families.experts import Gating
from weft.engine.layers.block import Block, HeadLayer, Layer, Linear
from weft.engine.layers.feed_forward import Experts
from weft.engine.layers.norm import HeadNorm
from weft.engine.layers.recurrence import CausalConvolution, DeltaRule, SelectiveScan, StateSpace, StateSpaceScan
from weft.engine.weights.reader import ExpertsRef, WeightReader, WeightRef


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
