"""All caches of a model in one object: each kind of cache has a backend that serves its groups.

The runner begins a step here. The blocks of the model then reach their caches, by index, through the result.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.engine.cache.specs import CacheGroup, CacheSpec
from weft.engine.kernels.torch.states import StateCache
from weft.engine.layers.attention import AttentionBackend
from weft.engine.layers.step_caches import StepCaches
from weft.engine.step.batch import Batch


@dataclass(frozen=True, slots=True)
class Caches:
    """The backends of a model; states is None if no layer keeps a state."""

    attention: AttentionBackend
    states: StateCache | None = None

    @property
    def name(self) -> str:
        """Name of the attention backend, for the log."""
        return self.attention.name

    @property
    def supports_graphs(self) -> bool:
        """See `AttentionBackend`."""
        return self.attention.supports_graphs

    @property
    def are_graphs_of_decodes(self) -> bool:
        """Whether graphs can only hold steps in which each request computes one token.

        Layers with states see on the host how many tokens each request has.
        """
        return self.states is not None

    @property
    def may_repeat(self) -> bool:
        """Whether a failed step may be launched again: true if it then writes the same values to the same places."""
        return self.states is None

    def prepare(self) -> bool:
        """See `AttentionBackend`."""
        return self.attention.prepare()

    def blocks(self, groups: Sequence[CacheGroup[CacheSpec]]) -> list[list[torch.Tensor]]:
        """The tensors that hold the blocks of each cache group, each (num_blocks, ...) and contiguous."""
        return [[tensor for layer in group.layers for tensor in self._layer_blocks(layer)] for group in groups]

    def _layer_blocks(self, layer: int) -> Sequence[torch.Tensor]:
        if self.states is not None and layer in self.states.states:
            return (self.states.states[layer],)
        return self.attention.blocks(layer)

    def begin(self, batch: Batch) -> StepCaches:
        """Do the copies of the batch, and prepare what the layers of each kind share."""
        if self.states is None:
            return StepCaches(self.attention.begin(batch))
        paged = tuple(group for index, group in enumerate(batch.groups) if index not in self.states.groups)
        return StepCaches(self.attention.begin(dataclasses.replace(batch, groups=paged)), self.states.begin(batch))
