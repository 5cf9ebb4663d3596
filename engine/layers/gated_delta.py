"""A mixer of linear attention: projections, short convolution, delta rule, gated norm (Yang et al., 2024)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.layers.block import BlockStep, Mixer
from weft.engine.layers.convolution import CausalConvolution
from weft.engine.layers.delta_rule import DeltaInputs, DeltaRule
from weft.engine.layers.norm import normalise
from weft.engine.layers.parts import Linear
from weft.engine.layers.pointwise import sigmoid, softplus


class DeltaProjected(NamedTuple):
    """What the projections make of hidden states, each (num_tokens, ...).

    Attributes:
        qkv: Queries and keys (num_key_heads * key_dim each), then values (num_heads * value_dim).
        gate: (num_heads * value_dim) of the outputs.
        rates: (num_heads), before the sigmoid.
        decays: (num_heads, or num_heads * key_dim), before bias and softplus.
    """

    qkv: torch.Tensor
    gate: torch.Tensor
    rates: torch.Tensor
    decays: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Heads of a layer; each head of queries and keys serves num_heads / num_key_heads heads in a row."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        """Values of all keys of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Values of all values of a token."""
        return self.num_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class SplitProjections:
    """Matrices whose outputs, one after another, are the fields of `DeltaProjected`.

    Attributes:
        sizes: For each matrix, the sizes of the fields that it makes.
    """

    linears: tuple[Linear, ...]
    sizes: tuple[tuple[int, ...], ...]

    def __call__(self, hidden: torch.Tensor) -> DeltaProjected:
        """What they make of hidden states (num_tokens, hidden_size)."""
        pairs = zip(self.linears, self.sizes, strict=True)
        return DeltaProjected(*(part for linear, sizes in pairs for part in linear(hidden).split_with_sizes(sizes, 1)))


@dataclass(frozen=True, slots=True)
class GatedDelta(Mixer):
    """Linear attention by the gated delta rule.

    Attributes:
        decay_rates: (num_heads, 1) float32, at most 0.
        decay_bias: Of all decays, float32.
        norm_weight: (value_dim,) of the norm over each head's outputs.
        first_cache: Index of the convolution's cache in the model; the state's is the next.
    """

    projections: SplitProjections
    convolution: CausalConvolution
    rule: DeltaRule
    output: Linear
    sizes: DeltaSizes
    decay_rates: torch.Tensor
    decay_bias: torch.Tensor
    norm_weight: torch.Tensor
    eps: float
    first_cache: int

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        states = step.caches.states
        assert states is not None
        projected = self.projections(normed)
        qkv = self.convolution.step(projected.qkv, states, self.first_cache)
        inputs = self._inputs(qkv.float(), projected)
        outputs = self.rule(inputs, states, self.first_cache + 1)
        gate = F.silu(projected.gate.float()).view_as(outputs)
        return (normalise(outputs, self.eps) * self.norm_weight).mul_(gate).to(normed.dtype).flatten(1)

    def _inputs(self, qkv: torch.Tensor, projected: DeltaProjected) -> DeltaInputs:
        sizes, num_tokens = self.sizes, qkv.size(0)
        heads, values = qkv.split_with_sizes((2 * sizes.keys, sizes.values), 1)
        heads = heads.view(num_tokens, 2, sizes.num_key_heads, sizes.key_dim)
        heads = heads * heads.square().sum(-1, keepdim=True).add_(1e-6).rsqrt_()  # unit vectors
        queries, keys = heads.repeat_interleave(sizes.num_heads // sizes.num_key_heads, 2).unbind(1)
        decays = softplus(projected.decays.float() + self.decay_bias).view(num_tokens, sizes.num_heads, -1)
        return DeltaInputs(
            queries * sizes.key_dim**-0.5,
            keys,
            values.view(num_tokens, sizes.num_heads, sizes.value_dim),
            decays * self.decay_rates,
            sigmoid(projected.rates.float()).unsqueeze(-1),
        )

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.output.add_to(residual, mixed)
