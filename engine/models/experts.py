"""The description of a layer of experts, and how it is built."""

from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine.describe.specs import DenseSpec, FeedForwardSpec, NormSpec, OutputSpec
from weft.engine.layers.all_ranks import of_all_ranks
from weft.engine.layers.block import FeedForward, unchanged
from weft.engine.layers.chained import scaled
from weft.engine.layers.experts import ExpertLayer, ScaledInputs, SharedExpert
from weft.engine.layers.kit import LayerKit
from weft.engine.layers.parts import Layer
from weft.engine.layers.routing import Gating, Routing
from weft.engine.models.config import ModelConfig
from weft.engine.models.families.experts import ExpertSwitches
from weft.engine.weights.formats import WeightReader
from weft.engine.weights.refs import ExpertsRef, RowOrder, TensorRef, WeightRef


@dataclass(frozen=True, slots=True)
class ExpertsSpec(FeedForwardSpec):
    """`ExpertLayer`.

    Attributes:
        router, router_bias: (num_experts, hidden_size) and (num_experts,).
        correction: The bias of `Routing.choose`.
        shared: Without norm and scale, which are for the sum of all outputs.
        shared_gate: (1, hidden_size), of `SharedExpert`; None if the shared expert counts in full.
        scales_inputs: Whether the experts are `ScaledInputs`.
        norm: Of the sum of all outputs; None for none.
        scale: Factor on that.
        is_partial: Whether the sums of all ranks are summed first.
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
    scales_inputs: bool = False
    norm: NormSpec | None = None
    scale: float = 1.0
    is_partial: bool = False

    @override
    def build(self, kit: LayerKit, reader: WeightReader) -> FeedForward:
        bias = None if self.router_bias is None else reader.tensor(self.router_bias)
        correction = None if self.correction is None else reader.tensor(self.correction).flatten()
        experts = kit.experts(self.gate_up, self.down, reader, self.gating)
        return ExpertLayer(
            kit.router(reader.tensor(self.router), bias),
            self.routing,
            ScaledInputs(experts) if self.scales_inputs else experts,
            correction,
            self._shared(kit, reader),
            self._follower(kit, reader),
        )

    @override
    def experts_bytes(self, kit: LayerKit, dtype: torch.dtype) -> int:
        return kit.experts_bytes(self.gate_up, self.down, self.gating, dtype)

    def _shared(self, kit: LayerKit, reader: WeightReader) -> FeedForward | None:
        if self.shared is None:
            return None
        shared = self.shared.build(kit, reader)
        return SharedExpert(kit.router(reader.tensor(self.shared_gate), None), shared) if self.shared_gate else shared

    def _follower(self, kit: LayerKit, reader: WeightReader) -> Layer | None:
        if self.norm is None and self.scale == 1.0 and not self.is_partial:
            return None
        layer = self.norm.build(kit, reader) if self.norm else unchanged
        layer = layer if self.scale == 1.0 else scaled(layer, self.scale)
        return of_all_ranks(layer) if self.is_partial else layer


def experts_spec(
    switches: ExpertSwitches, config: ModelConfig, layer: str, output_norm: NormSpec | None
) -> ExpertsSpec:
    """The experts of the layer of this name."""
    hidden, names, count = config.hidden_size, switches.names, switches.num_experts
    gating = switches.gating or Gating(config.activation, has_gate=config.switches.is_gated)
    order = RowOrder(switches.size, (1, 1)) if switches.is_interleaved else None
    gate_up = _matrix(switches, layer, names.gate_up, (switches.size,) * gating.num_parts, hidden, order)
    down = _matrix(switches, layer, (names.down,), (hidden,), switches.size)
    shape = (1, count) if switches.has_correction_row else (count,)
    correction = TensorRef(f"{layer}.{names.correction}", shape, dtype=torch.float32)
    return ExpertsSpec(
        router=TensorRef(f"{layer}.{names.router}.weight", (count, hidden)),
        router_bias=TensorRef(f"{layer}.{names.router}.bias", (count,)) if switches.router_bias else None,
        correction=correction if names.correction else None,
        routing=switches.routing,
        gate_up=ExpertsRef(gate_up, count, names.suffixes, _fused(layer, names.gate_up, "gate_up_proj")),
        down=ExpertsRef(down, count, names.suffixes, _fused(layer, (names.down,), "down_proj")),
        gating=gating,
        shared=_shared(switches, config, layer) if switches.shared_size else None,
        shared_gate=TensorRef(f"{layer}.{names.shared_gate}.weight", (1, hidden)) if names.shared_gate else None,
        scales_inputs=switches.scales_inputs,
        norm=output_norm,
        scale=config.switches.residual_scale,
    )


def _matrix(
    switches: ExpertSwitches,
    layer: str,
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    in_features: int,
    order: RowOrder | None = None,
) -> WeightRef:
    full = tuple(f"{layer}.{name}" for name in names)
    return WeightRef(full, sizes, in_features, switches.expert_bias, order=order, is_transposed=switches.is_transposed)


def _shared(switches: ExpertSwitches, config: ModelConfig, layer: str) -> FeedForwardSpec:
    hidden, size, bias = config.hidden_size, switches.shared_size, switches.shared_bias
    names = tuple(f"{layer}.{name}" for name in switches.names.shared_gate_up)
    output = OutputSpec(WeightRef((f"{layer}.{switches.names.shared_down}",), (hidden,), size, bias))
    sizes = (size, size) if config.switches.is_gated else (size,)
    return DenseSpec(WeightRef(names, sizes, hidden, bias), config.activation, output)


def _fused(layer: str, names: tuple[str, ...], fused: str) -> str:
    """The tensor that holds all experts of a layer where they are not apart."""
    return f"{layer}.{names[0].partition('{}')[0]}{fused}" if names[0].endswith("_proj") and "{}" in names[0] else ""
