"""Describes layers of experts, alone or with a dense layer beside them (Gemma 4), and builds them.

The layer of experts alone is `ExpertLayer` in `engine/layers/kernels.py`. In Gemma 4 a dense layer and experts read the
hidden states through norms of their own.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from typing_extensions import override

from weft.engine.describe.config import ModelConfig
from weft.engine.describe.cut import Cut
from weft.engine.describe.specs import DenseSpec, FeedForwardSpec, NormSpec, OutputSpec
from weft.engine.describe.tensor_names import dense_spec, feed_forward_spec, norm_spec
from weft.engine.families.experts import ExpertSwitches, Gating, Routing, TopK
from weft.engine.families.gemma import Gemma4Experts
from weft.engine.fields import MAX_NUM_EXPERTS_IN_ALL
from weft.engine.layers.all_ranks import of_all_ranks
from weft.engine.layers.block import FeedForward, Layer, Linear, unchanged
from weft.engine.layers.feed_forward import ExpertLayer, Experts, ScaledInputs, SharedExpert, choose
from weft.engine.layers.kernels import LayerKernels
from weft.engine.layers.wrapped_linear import scaled
from weft.engine.weights.reader import ExpertsRef, RowOrder, TensorRef, WeightReader, WeightRef
from weft.engine.wire.errors import ModelError


@dataclass(frozen=True, slots=True)
class ExpertsSpec(FeedForwardSpec):
    """`ExpertLayer`.

    Attributes:
        router, router_bias: (num_experts, hidden_size) and (num_experts,).
        correction: The bias of `choose`.
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
    def build(self, kernels: LayerKernels, reader: WeightReader) -> FeedForward:
        bias = None if self.router_bias is None else reader.tensor(self.router_bias)
        correction = None if self.correction is None else reader.tensor(self.correction).flatten()
        experts = kernels.experts(self.gate_up, self.down, reader, self.gating)
        return ExpertLayer(
            kernels.router(reader.tensor(self.router), bias),
            self.routing,
            ScaledInputs(experts) if self.scales_inputs else experts,
            correction,
            self._shared(kernels, reader),
            self._epilogue(kernels, reader),
        )

    @override
    def experts_bytes(self, kernels: LayerKernels, dtype: torch.dtype) -> int:
        return kernels.experts_bytes(self.gate_up, self.down, self.gating, dtype)

    @override
    def cut(self, cut: Cut) -> Self:
        # The shared expert is summed with the others, so all are divided or none is.
        shared = self.shared and self.shared.cut(cut)
        if not cut.divides(*self.gate_up.matrix.sizes) or (shared and shared is self.shared):
            return self
        if isinstance(shared, DenseSpec):
            shared = replace(shared, output=replace(shared.output, is_partial=False))
        gate_up = replace(self.gate_up, matrix=cut.inner(self.gate_up.matrix))
        down = replace(self.down, matrix=cut.by_inputs(self.down.matrix))
        return replace(self, gate_up=gate_up, down=down, shared=shared, is_partial=cut.has_sums)

    def _shared(self, kernels: LayerKernels, reader: WeightReader) -> FeedForward | None:
        if self.shared is None:
            return None
        shared = self.shared.build(kernels, reader)
        return (
            SharedExpert(kernels.router(reader.tensor(self.shared_gate), None), shared) if self.shared_gate else shared
        )

    def _epilogue(self, kernels: LayerKernels, reader: WeightReader) -> Layer | None:
        if self.norm is None and self.scale == 1.0 and not self.is_partial:
            return None
        layer = self.norm.build(kernels, reader) if self.norm else unchanged
        layer = layer if self.scale == 1.0 else scaled(layer, self.scale)
        return of_all_ranks(layer) if self.is_partial else layer


@feed_forward_spec.register
def experts_spec(
    switches: ExpertSwitches, config: ModelConfig, layer: str, output_norm: NormSpec | None
) -> ExpertsSpec:
    """The experts of the layer of this name.

    Raises:
        ModelError: There are none, too many in all layers, or not as many as a token chooses of them.
    """
    hidden, names, count = config.hidden_size, switches.names, switches.num_experts
    _check_numbers(switches, config.num_layers)
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


def _check_numbers(switches: ExpertSwitches, num_layers: int) -> None:
    count, routing = switches.num_experts, switches.routing
    if not 1 <= count * num_layers <= MAX_NUM_EXPERTS_IN_ALL:
        raise ModelError(
            f"all layers must have between 1 and {MAX_NUM_EXPERTS_IN_ALL} experts together, got {count} in each of "
            f"{num_layers}"
        )
    num_groups, num_best = (routing.num_groups, routing.num_best_groups) if isinstance(routing, TopK) else (1, 1)
    if count % num_groups or not 1 <= num_best <= num_groups:
        raise ModelError(f"{count} experts cannot be in {num_groups} groups, of which {num_best} are chosen")
    if not 1 <= routing.num_chosen <= count // num_groups * num_best:
        raise ModelError(f"a token cannot choose {routing.num_chosen} of {count // num_groups * num_best} experts")


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


@dataclass(frozen=True, slots=True)
class ExpertsBeside(FeedForward):
    """A dense layer and experts beside it; the sum of both, normalised, is added.

    Attributes:
        dense: With a norm of its outputs.
        router_norm, experts_norm: Of the hidden states.
        expert_scales: (num_experts,), factors on shares.
        outputs_norm: Of what the experts make together.
        norm: Of the sum.
    """

    dense: FeedForward
    router_norm: Layer
    router: Linear
    routing: Routing
    expert_scales: torch.Tensor
    experts_norm: Layer
    experts: Experts
    outputs_norm: Layer
    norm: Layer

    @override
    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        outputs, chosen = torch.zeros_like(residual), torch.zeros_like(residual)
        ids, shares = choose(self.routing, self.router.to_float32(self.router_norm(residual)), None)
        finish = self.experts.start(chosen, self.experts_norm(residual), ids, shares * self.expert_scales[ids])
        self.dense.add_to(outputs, normed)
        finish()
        residual += self.norm(outputs.add_(self.outputs_norm(chosen)))


@dataclass(frozen=True, slots=True)
class ExpertsBesideSpec(FeedForwardSpec):
    """`ExpertsBeside`.

    Attributes:
        router_scale: (hidden_size,), weights of the router's norm before they are divided by the root of their number.
    """

    dense: FeedForwardSpec
    experts: ExpertsSpec
    router_scale: TensorRef
    expert_scales: TensorRef
    experts_norm: NormSpec
    outputs_norm: NormSpec
    norm: NormSpec

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader) -> FeedForward:
        scale, experts = reader.tensor(self.router_scale), self.experts
        outputs_norm = self.outputs_norm.build(kernels, reader)
        return ExpertsBeside(
            self.dense.build(kernels, reader),
            kernels.norm(scale * len(scale) ** -0.5, self.norm.eps),
            kernels.router(reader.tensor(experts.router), None),
            experts.routing,
            reader.tensor(self.expert_scales),
            self.experts_norm.build(kernels, reader),
            kernels.experts(experts.gate_up, experts.down, reader, experts.gating),
            of_all_ranks(outputs_norm) if experts.is_partial else outputs_norm,
            self.norm.build(kernels, reader),
        )

    @override
    def cut(self, cut: Cut) -> Self:
        experts, dense = self.experts.cut(cut), self.dense.cut(cut)
        return self if experts is self.experts and dense is self.dense else replace(self, experts=experts, dense=dense)


@feed_forward_spec.register
def experts_beside_spec(
    switches: Gemma4Experts, config: ModelConfig, layer: str, output_norm: NormSpec | None
) -> ExpertsBesideSpec:
    """The feed-forward layer of the layer of this name."""
    experts = experts_spec(switches.experts, config, layer, None)
    assert output_norm is not None
    dense = replace(config, intermediate_size=switches.dense_size)
    return ExpertsBesideSpec(
        dense_spec(dense, layer, norm_spec(config, f"{layer}.post_feedforward_layernorm_1")),
        experts,
        TensorRef(f"{layer}.router.scale", (config.hidden_size,), dtype=torch.float32),
        TensorRef(f"{layer}.router.per_expert_scale", (switches.experts.num_experts,), dtype=torch.float32),
        norm_spec(config, f"{layer}.pre_feedforward_layernorm_2"),
        norm_spec(config, f"{layer}.post_feedforward_layernorm_2"),
        output_norm,
    )
