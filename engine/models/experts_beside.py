"""The description of a dense layer with experts beside it, and how it is built."""

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from weft.engine.describe.specs import FeedForwardSpec, NormSpec
from weft.engine.describe.tensor_names import dense_spec, norm_spec
from weft.engine.layers.all_ranks import of_all_ranks
from weft.engine.layers.block import FeedForward
from weft.engine.layers.experts_beside import ExpertsBeside
from weft.engine.layers.kit import LayerKit
from weft.engine.models.config import ModelConfig
from weft.engine.models.experts import ExpertsSpec
from weft.engine.models.families.gemma4 import Gemma4Experts
from weft.engine.weights.formats import WeightReader
from weft.engine.weights.refs import TensorRef


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
    def build(self, kit: LayerKit, reader: WeightReader) -> FeedForward:
        scale, experts = reader.tensor(self.router_scale), self.experts
        outputs_norm = self.outputs_norm.build(kit, reader)
        return ExpertsBeside(
            self.dense.build(kit, reader),
            kit.norm(scale * len(scale) ** -0.5, self.norm.eps),
            kit.router(reader.tensor(experts.router), None),
            experts.routing,
            reader.tensor(self.expert_scales),
            self.experts_norm.build(kit, reader),
            kit.experts(experts.gate_up, experts.down, reader, experts.gating),
            of_all_ranks(outputs_norm) if experts.is_partial else outputs_norm,
            self.norm.build(kit, reader),
        )


def experts_beside_spec(
    switches: Gemma4Experts, config: ModelConfig, layer: str, output_norm: NormSpec | None
) -> ExpertsBesideSpec:
    """The feed-forward layer of the layer of this name."""
    experts = switches.experts.spec(config, layer, None)
    assert isinstance(experts, ExpertsSpec) and output_norm is not None
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
