"""What a draft model takes and whether it fits the served one, known before anything is loaded."""

from dataclasses import dataclass

from weft.engine.cache.specs import CacheGroup, CacheSpec, group_layers
from weft.engine.layers.kit import LayerKit
from weft.engine.models.config import ModelConfig, load_model_config
from weft.engine.models.layout import decoder_spec
from weft.engine.run.config import EngineConfig
from weft.engine.run.kernel_choice import choose_kit
from weft.engine.run.memory_plan import estimate_activations_bytes
from weft.engine.shared.errors import ModelError
from weft.engine.speculation.draft_model import match_groups


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A checked draft model; by its cache group, `group_indices` names the served group whose block tables it uses."""

    config: ModelConfig
    kit: LayerKit
    groups: tuple[CacheGroup[CacheSpec], ...]
    group_indices: list[int]
    weights_bytes: int
    activations_bytes: int


def find_draft_checkpoint(config: EngineConfig, served: ModelConfig) -> DraftCheckpoint | None:
    """Read the configuration of the draft model; None without one.

    Raises:
        ModelError: It cannot be read, or cannot draft for the served model.
    """
    if config.draft_model is None:
        return None
    draft = load_model_config(config.draft_model)
    if draft.vocab_size != served.vocab_size:
        raise ModelError(
            f"the draft model must have the vocabulary of the model: it has {draft.vocab_size} token ids, "
            f"the model {served.vocab_size}"
        )
    kit = choose_kit(draft, config)
    groups = group_layers(decoder_spec(draft).caches)
    return DraftCheckpoint(
        config=draft,
        kit=kit,
        groups=groups,
        group_indices=match_groups(groups, group_layers(decoder_spec(served).caches)),
        weights_bytes=decoder_spec(draft).weights_bytes(kit, config.dtype),
        activations_bytes=estimate_activations_bytes(draft, config),
    )
