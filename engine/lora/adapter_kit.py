"""A kit whose layers take adapters: it wraps another kit and the layers that this makes."""

from collections.abc import Sequence
from typing import cast

from weft.engine.layers.block import Block
from weft.engine.layers.experts import Experts
from weft.engine.layers.gated import Activated
from weft.engine.layers.kit import LayerKit
from weft.engine.layers.parts import Layer, Linear
from weft.engine.layers.routing import Gating
from weft.engine.lora.adapted_experts import AdaptedExperts, SeparableExperts
from weft.engine.lora.adapted_layers import (
    AdaptedActivation,
    AdaptedBlocks,
    AdaptedEmbedding,
    AdaptedLinear,
    without_adapters,
)
from weft.engine.lora.adapters import Adapters
from weft.engine.weights.formats import WeightReader
from weft.engine.weights.refs import ExpertsRef, WeightRef


class AdapterKit:
    """See `LayerKit`. What is not here, such as norms, has no adapters and is the inner kit's."""

    def __init__(self, kit: LayerKit, adapters: Adapters) -> None:
        """Take the kit that makes the layers, and what keeps the adapters."""
        self._kit, self._adapters, self._step = kit, adapters, adapters.step

    @classmethod
    def around(cls, kit: LayerKit, adapters: Adapters) -> LayerKit:
        """The kit with adapters."""
        return cast(LayerKit, cls(kit, adapters))

    def __getattr__(self, name: str) -> object:
        return getattr(self._kit, name)

    def linear(self, ref: WeightRef, reader: WeightReader) -> Linear:
        """See `LayerKit`."""
        return AdaptedLinear(self._kit.linear(ref, reader), self._adapters.matrix_site(ref), self._step)

    def gated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        """See `LayerKit`."""
        layer = cast(Activated, self._kit.gated(ref, reader, activation))
        return AdaptedActivation(layer, self._adapters.matrix_site(ref), self._step)

    def ungated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        """See `LayerKit`."""
        layer = cast(Activated, self._kit.ungated(ref, reader, activation))
        return AdaptedActivation(layer, self._adapters.matrix_site(ref), self._step)

    def experts(self, gate_up: ExpertsRef, down: ExpertsRef, reader: WeightReader, gating: Gating) -> Experts:
        """See `LayerKit`."""
        experts = self._kit.experts(gate_up, down, reader, gating)
        first, second = (self._adapters.expert_sites(ref) for ref in (gate_up, down))
        if not (first and second):
            return experts
        return AdaptedExperts(cast(SeparableExperts, experts), first, second, self._step)

    def embedding(self, ref: WeightRef, reader: WeightReader) -> Layer:
        """See `LayerKit`."""
        return AdaptedEmbedding(self._kit.embedding(ref, reader), self._adapters.embedding_site(ref), self._step)

    def tied(self, ref: WeightRef, reader: WeightReader) -> tuple[Layer, Linear]:
        """See `LayerKit`; adapters of the embedding and of the head are different ones."""
        embedding, head = self._kit.tied(ref, reader)
        sites = self._adapters.embedding_site(ref), self._adapters.head_site(ref)
        return AdaptedEmbedding(embedding, sites[0], self._step), AdaptedLinear(head, sites[1], self._step)

    def fuse(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """See `LayerKit`."""
        plain = self._kit.fuse([without_adapters(block) for block in blocks])
        return [AdaptedBlocks(plain, self._kit.fuse(blocks), self._step)] if blocks else blocks
