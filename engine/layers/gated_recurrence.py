"""The recurrent mixer of Griffin (De et al., 2024): short convolution, real-gated linear recurrent unit, gate."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.layers.block import BlockStep, Mixer
from weft.engine.layers.convolution import CausalConvolution
from weft.engine.layers.parts import Layer, Linear
from weft.engine.layers.recurrence import run_requests
from weft.engine.layers.step_caches import StateStep

_SHARPNESS = 8.0


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


@dataclass(frozen=True, slots=True)
class GatedRecurrence(Mixer):
    """The unit behind a convolution, and a gate beside both.

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
        states = step.caches.states
        assert states is not None
        inputs, gate = self.inputs(normed).chunk(2, 1)
        mixed = self.convolution.step(inputs, states, self.first_cache)
        return self.unit(mixed, states, self.first_cache + 1).to(normed.dtype).mul_(self.activation(gate))

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.output.add_to(residual, mixed)


def recurrent_unit(
    weights: tuple[torch.Tensor, ...], biases: tuple[torch.Tensor, ...], rate: torch.Tensor
) -> RecurrentUnit:
    """Take the tensors of a checkpoint: those of the gates of inputs and decays, and `rate` (channels,)."""
    return RecurrentUnit(torch.stack(weights), torch.stack(biases).unsqueeze(2), -_SHARPNESS * F.softplus(rate))
