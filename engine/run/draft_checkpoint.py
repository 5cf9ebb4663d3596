"""Checks that a draft model fits the served model, and what it costs, before anything is loaded."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_fields

from weft.engine.cache.specs import CacheGroup, CacheSpec
from weft.engine.config import EngineConfig
from weft.engine.memory_plan import estimate_activations_bytes
from weft.engine.models.facts import ModelFacts
from weft.engine.shared.errors import ModelError
from weft.engine.start.model_choice import ModelPlan, plan_model, read_model


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A checked draft model.

    Attributes:
        engine_config: That of the served model, with the kernels that compute this one.
        group_indices: For each of its cache groups, the served group whose block tables it uses.
    """

    config: ModelFacts
    engine_config: EngineConfig
    plan: ModelPlan
    groups: tuple[CacheGroup[CacheSpec], ...]
    group_indices: list[int]
    activations_bytes: int


def find_draft_checkpoint(
    config: EngineConfig,
    vocab_size: int,
    served: ModelPlan,
    settle: Callable[[ModelFacts, EngineConfig], EngineConfig] = lambda model, config: config,
) -> DraftCheckpoint | None:
    """Read the configuration of the draft model; None without one.

    Args:
        vocab_size: Of the served model.
        settle: Names the kernels that compute it.

    Raises:
        ModelError: It cannot be read, or cannot draft for the served model.
    """
    if config.draft_model is None:
        return None
    draft = read_model(config.draft_model, config.options.model_impl)
    if draft.vocab_size != vocab_size:
        raise ModelError(
            f"the draft model must have the vocabulary of the model: it has {draft.vocab_size} token ids, "
            f"the model {vocab_size}"
        )
    # The first of several ranks drafts alone, and without adapters: the model only accepts fewer of the drafts then.
    options = replace_fields(config.options, tensor_parallel_size=1, pipeline_parallel_size=1, max_loras=0)
    config = settle(draft, replace(config, options=options, kernels=options.kernels))
    try:
        plan = plan_model(draft, config)
    except ModelError as error:
        raise ModelError(f"the draft model cannot be used: {error}") from None
    groups = plan.groups
    return DraftCheckpoint(
        config=draft,
        engine_config=config,
        plan=plan,
        groups=groups,
        group_indices=match_groups(groups, served.groups),
        activations_bytes=estimate_activations_bytes(draft, config, plan.cache_specs),
    )


def match_groups(draft: Sequence[CacheGroup[CacheSpec]], served: Sequence[CacheGroup[CacheSpec]]) -> list[int]:
    """For each cache group of the draft model, the index of a served group that keeps all the blocks it reads.

    Raises:
        ModelError: The served model frees blocks that the draft model still reads, or one of the two has a cache that
            cannot be rolled back behind a refused draft.
    """
    if not all(group.spec.can_rewind for group in (*draft, *served)):
        raise ModelError("a draft model needs caches that can go back behind a refused draft, and a state cannot")

    def kept_by(group: CacheGroup[CacheSpec]) -> float:
        return group.spec.sliding_window or (math.inf if group.spec.sees_all else 0)  # a span may have just begun

    farthest = max(range(len(served)), key=lambda index: kept_by(served[index]))
    kept = kept_by(served[farthest])
    for group in draft:
        if (group.spec.sliding_window or math.inf) > kept:
            attended = group.spec.sliding_window or "all"
            raise ModelError(f"the draft model attends to {attended} tokens, but the model keeps only the last {kept}")
    return [farthest] * len(draft)
