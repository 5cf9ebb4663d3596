"""The description of a layer of experts, and how it is built."""

from dataclasses import dataclass

from typing_extensions import override

from weft.engine.layers.block import FeedForward, unchanged
from weft.engine.layers.chained import scaled
from weft.engine.layers.experts import ExpertLayer, SharedExpert
from weft.engine.layers.kit import LayerKit
from weft.engine.layers.parts import Layer
from weft.engine.layers.routing import Gating, Routing
from weft.engine.models.specs import FeedForwardSpec, NormSpec
from weft.engine.weights.formats import WeightReader
from weft.engine.weights.refs import ExpertsRef, TensorRef


@dataclass(frozen=True, slots=True)
class ExpertsSpec(FeedForwardSpec):
    """`ExpertLayer`.

    Attributes:
        router, router_bias: (num_experts, hidden_size) and (num_experts,).
        correction: The bias of `Routing.choose`.
        shared: Without norm and scale, which are for the sum of all outputs.
        shared_gate: (1, hidden_size), of `SharedExpert`; None if the shared expert counts in full.
        norm: Of the sum of all outputs; None for none.
        scale: Factor on that.
    """

    router: TensorRef
    router_bias: TensorRef | None
    correction: TensorRef | None
    routing: Routing
    gate_up: ExpertsRef
    down: ExpertsRef
    gating: Gating
    shared: FeedForwardSpec | None = None
    shared_gate: TensorRef | None = None
    norm: NormSpec | None = None
    scale: float = 1.0

    @override
    def build(self, kit: LayerKit, reader: WeightReader) -> FeedForward:
        bias = None if self.router_bias is None else reader.tensor(self.router_bias)
        correction = None if self.correction is None else reader.tensor(self.correction).flatten()
        return ExpertLayer(
            kit.router(reader.tensor(self.router), bias),
            self.routing,
            kit.experts(self.gate_up, self.down, reader, self.gating),
            correction,
            self._shared(kit, reader),
            self._follower(kit, reader),
        )

    def _shared(self, kit: LayerKit, reader: WeightReader) -> FeedForward | None:
        if self.shared is None:
            return None
        shared = self.shared.build(kit, reader)
        return SharedExpert(kit.router(reader.tensor(self.shared_gate), None), shared) if self.shared_gate else shared

    def _follower(self, kit: LayerKit, reader: WeightReader) -> Layer | None:
        if self.norm is None and self.scale == 1.0:
            return None
        layer = self.norm.build(kit, reader) if self.norm else unchanged
        return layer if self.scale == 1.0 else scaled(layer, self.scale)
