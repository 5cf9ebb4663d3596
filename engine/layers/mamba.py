"""Mixers of state space models: Mamba (Gu and Dao, 2023), Mamba 2 (Dao and Gu, 2024), and mixers side by side.

A mixer has two caches: that of its convolution and, with the next index, that of its state space.
"""

from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine.layers.block import BlockStep, Mixer
from weft.engine.layers.convolution import CausalConvolution
from weft.engine.layers.norm import RMSNorm
from weft.engine.layers.parts import Layer, Linear
from weft.engine.layers.selective_scan import SelectiveScan
from weft.engine.layers.state_space import StateSpaceScan
from weft.engine.layers.step_caches import StateStep


def _states(step: BlockStep) -> StateStep:
    assert step.caches.states is not None
    return step.caches.states


@dataclass(frozen=True, slots=True)
class MambaMixer(Mixer):
    """Mamba.

    Attributes:
        inputs: Makes the input of the convolution, then the gate.
        selection: Makes what time steps are made of, then b and c, of these sizes.
        selection_norms: Norms of those three; empty for none.
        times: Makes the time steps.
    """

    inputs: Linear
    convolution: CausalConvolution
    selection: Linear
    sizes: tuple[int, int, int]
    selection_norms: tuple[Layer, ...]
    times: Linear
    scan: SelectiveScan
    output: Linear
    cache: int

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        states = _states(step)
        x, gate = self.inputs(normed).chunk(2, 1)
        x = self.convolution.step(x, states, self.cache)
        times, b, c = self.selection(x).split_with_sizes(self.sizes, 1)
        if self.selection_norms:
            times, b, c = (norm(part) for norm, part in zip(self.selection_norms, (times, b, c), strict=True))
        return self.scan(x, self.times(times), (b, c), gate, states, self.cache + 1)

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.output.add_to(residual, mixed)


@dataclass(frozen=True, slots=True)
class Mamba2Mixer(Mixer):
    """Mamba 2.

    Attributes:
        inputs: Makes the gate, the input of the convolution and the time steps, of these sizes.
        norm: Of the gated outputs; None for none.
    """

    inputs: Linear
    sizes: tuple[int, int, int]
    convolution: CausalConvolution
    scan: StateSpaceScan
    norm: Layer | None
    output: Linear
    cache: int

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        states = _states(step)
        gate, channels, times = self.inputs(normed).split_with_sizes(self.sizes, 1)
        channels = self.convolution.step(channels, states, self.cache)
        outputs = self.scan(channels, times, gate, states, self.cache + 1)
        return self.norm(outputs) if self.norm else outputs

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.output.add_to(residual, mixed)


def grouped_norm(weight: torch.Tensor, eps: float, num_groups: int) -> Layer:
    """RMSNorm of each group of the last dimension by itself; weight (size,)."""
    norm = RMSNorm(weight.view(num_groups, -1), eps)
    return lambda hidden: norm(hidden.view(len(hidden), num_groups, -1)).flatten(1)


@dataclass(frozen=True, slots=True)
class ParallelMixers(Mixer):
    """Mixers that read the same hidden states; widths are the inner sizes of each."""

    mixers: tuple[Mixer, ...]
    widths: tuple[int, ...]

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        return torch.cat([mixer.mix(normed, step) for mixer in self.mixers], 1)

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        for mixer, part in zip(self.mixers, mixed.split_with_sizes(self.widths, 1), strict=True):
            mixer.add_to(residual, part)
