"""What a model takes of its device, and of host memory, before anything is loaded.

Where the options leave open which experts stay in host memory, this decides it, by what is free now.
"""

from dataclasses import dataclass, replace

import torch
from msgspec.structs import replace as replace_fields

from weft.engine import config as engine_config
from weft.engine.cache.specs import CacheGroup, CacheSpec
from weft.engine.config import EngineConfig
from weft.engine.describe.config import ModelFacts
from weft.engine.host_memory import num_layers_to_move
from weft.engine.memory_plan import MemoryPlan, check_fit, estimate_activations_bytes, least_kv_bytes, make_plan
from weft.engine.start.draft_head import find_draft
from weft.engine.start.draft_model import DraftCheckpoint
from weft.engine.start.model_choice import ModelPlan, plan_largest
from weft.engine.wire.machine import SHARE_OF_FREE_MEMORY


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is known of a model before the KV cache is divided; bytes are those of a rank.

    Attributes:
        config: With the decision which experts stay in host memory.
        free_bytes: Of the device.
        free_host_bytes: Of the host, without what kv_offload will take.
    """

    model: ModelFacts
    config: EngineConfig
    chosen: ModelPlan
    draft: DraftCheckpoint | None
    groups: tuple[CacheGroup[CacheSpec], ...]
    weights_bytes: int
    activations_bytes: int
    free_bytes: int
    free_host_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Of the device: weights, activations, and the KV cache that is asked for, or else the least useful one."""
        kv_bytes = self.config.options.kv_cache_memory
        if kv_bytes is None:
            kv_bytes = int(least_kv_bytes(self.config, self.groups) / SHARE_OF_FREE_MEMORY[self.config.device.type])
        return self.weights_bytes + self.activations_bytes + kv_bytes

    def check_host(self) -> None:
        """Refuse experts in host memory that do not fit there; raises ModelError."""
        self.chosen.host.check(self.free_host_bytes)

    def check_fit(self) -> None:
        """Refuse a model that is alone on its device and does not fit; raises ModelError."""
        sizes = {"weights_bytes": self.weights_bytes, "activations_bytes": self.activations_bytes}
        check_fit(**sizes, free_bytes=self.free_bytes, host=self.chosen.host)
        self.check_host()

    def plan(self, left_bytes: int, kv_cache_memory: int | None) -> MemoryPlan:
        """Divide left_bytes of what weights and activations leave; raises ModelError if no request fits."""
        options = replace_fields(self.config.options, kv_cache_memory=kv_cache_memory)
        return make_plan(
            replace(self.config, options=options),
            self.groups,
            weights_bytes=self.weights_bytes,
            activations_bytes=self.activations_bytes,
            free_bytes=left_bytes,
            adapters_bytes=self.chosen.adapters_bytes,
            vision_bytes=self.chosen.vision_bytes,
            encoding_bytes=self.chosen.encoding_bytes,
            host=self.chosen.host,
        )


def find_sizes(model: ModelFacts, config: EngineConfig) -> Sizes:
    """Plan a model and its draft model, with as few experts in host memory as it takes unless the options say more.

    Raises:
        ModelError: The options ask for what this model cannot have.
    """
    options, sizes = config.options, _sizes(model, config)
    if options.host_expert_layers is not None or engine_config.host_experts_fault(options, config.device):
        return sizes
    experts_bytes = sizes.chosen.experts_bytes
    if not num_layers_to_move(sizes.needed_bytes, sizes.free_bytes, experts_bytes):
        return sizes
    # Steps that wait for the CPU have fewer tokens, and so take less memory: this is planned first.
    config = replace(engine_config.resolve(options, model, len(experts_bytes)), kernels=config.kernels)
    sizes = _sizes(model, replace(config, num_host_layers=0))
    number = max(num_layers_to_move(sizes.needed_bytes, sizes.free_bytes, experts_bytes), 1)
    return _sizes(model, replace(config, num_host_layers=number))


def _sizes(model: ModelFacts, config: EngineConfig) -> Sizes:
    chosen = plan_largest(model, config)
    draft = find_draft(config, model, chosen)
    activations_bytes = estimate_activations_bytes(model, config, chosen.cache_specs)
    return Sizes(
        model=model,
        config=config,
        chosen=chosen,
        draft=draft,
        groups=chosen.planned_groups + (draft.groups if draft else ()),
        weights_bytes=chosen.weights_bytes + (draft.plan.weights_bytes if draft else 0),
        activations_bytes=max(activations_bytes, draft.activations_bytes if draft else 0, chosen.encoding_bytes),
        free_bytes=engine_config.free_bytes(config),
        free_host_bytes=engine_config.available_memory_bytes(torch.device("cpu")) - config.options.kv_offload,
    )
