"""Mixers with a gated recurrent state: linear attention by the gated delta rule, and the recurrence of Griffin.

The first has projections, a short convolution, the delta rule and a gated norm (Yang et al., 2024). The second has a
short convolution, a real-gated linear recurrent unit and a gate (De et al., 2024). Each has two caches: that of its
convolution and, with the next index, that of its state. `linear_attention.py` describes and builds them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.layers.block import BlockStep, Layer, Linear, ProjectedMixer, StateStep
from weft.engine.layers.feed_forward import sigmoid, softplus
from weft.engine.layers.norm import normalise
from weft.engine.layers.recurrence import CausalConvolution, DeltaInputs, DeltaRule, run_requests


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
class GatedDelta(ProjectedMixer):
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
        states = step.caches.kept
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


@dataclass(frozen=True, slots=True)
class RecurrentUnit:
    """The unit: state <- decay * state + sqrt(1 - decay ** 2) * gate * input, for each channel by itself, in float32.

    Attributes:
        weights: (2, num_blocks, size, size) of the gates of inputs and decays, each a matrix of blocks.
        biases: (2, num_blocks, 1, size).
        rates: (channels,) float32, at most 0: logarithms of the decays where their gate is open.
    """

    weights: torch.Tensor
    biases: torch.Tensor
    rates: torch.Tensor

    def __call__(self, inputs: torch.Tensor, states: StateStep, cache: int) -> torch.Tensor:
        """(num_tokens, channels) -> the same in float32."""
        num_blocks, size = self.biases.shape[1], self.biases.shape[-1]
        blocks = inputs.view(-1, num_blocks, size).transpose(0, 1)
        gates = (blocks @ self.weights + self.biases).float().sigmoid_()  # (2, num_blocks, num_tokens, size)
        gate, openness = gates.transpose(1, 2).flatten(2).unbind(0)
        log_decays = openness * self.rates
        shares = (1 - (2 * log_decays).exp()).sqrt_()
        # The first token of a request is taken in full.
        starts = states.query_start_locs[:-1]
        firsts = slice(None) if len(starts) == len(shares) else torch.as_tensor(starts, device=shares.device)
        shares[firsts] = torch.where(states.is_new.unsqueeze(-1), 1.0, shares[firsts])
        tokens = (log_decays.exp_(), inputs.float() * gate * shares)
        outputs, after = run_requests(_update, _scan, tokens, states.read(cache), states.query_start_locs)
        states.write(cache, after)
        return outputs


def _update(decays: torch.Tensor, inputs: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    states = torch.addcmul(inputs, decays, states)
    return states, states


def _scan(decays: torch.Tensor, inputs: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over 1, 2, 4, ... tokens (Hillis and Steele, 1986): each pass adds what came as many tokens before."""
    decays, sums = decays.clone(), inputs.clone()
    sums[0].addcmul_(decays[0], states[0])
    distance = 1
    while distance < len(sums):
        sums[distance:] = torch.addcmul(sums[distance:], decays[distance:], sums[:-distance])
        decays[distance:] = decays[distance:] * decays[:-distance]
        distance *= 2
    return sums, sums[-1:]


_SHARPNESS = 8.0


def recurrent_unit(
    weights: tuple[torch.Tensor, ...], biases: tuple[torch.Tensor, ...], rate: torch.Tensor
) -> RecurrentUnit:
    """Take the tensors of a checkpoint: those of the gates of inputs and decays, and `rate` (channels,)."""
    return RecurrentUnit(torch.stack(weights), torch.stack(biases).unsqueeze(2), -_SHARPNESS * F.softplus(rate))


@dataclass(frozen=True, slots=True)
class GatedRecurrence(ProjectedMixer):
    """Griffin's recurrence: the unit behind a convolution, and a gate beside both.

    Attributes:
        inputs: (num_tokens, hidden_size) -> inputs, then gate, each (num_tokens, channels).
        first_cache: Index of the convolution's cache in the model; the unit's is the next.
    """

    inputs: Linear
    convolution: CausalConvolution
    unit: RecurrentUnit
    activation: Layer
    output: Linear
    first_cache: int

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        states = step.caches.kept
        inputs, gate = self.inputs(normed).chunk(2, 1)
        mixed = self.convolution.step(inputs, states, self.first_cache)
        return self.unit(mixed, states, self.first_cache + 1).to(normed.dtype).mul_(self.activation(gate))
