"""Wire types of GET /v1/models: one model and the list of all models."""

from typing import Literal

import msgspec


class SamplingDefaults(msgspec.Struct, omit_defaults=True):
    """The checkpoint's own defaults for fields that a request leaves out. An extension."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ModelCard(msgspec.Struct):
    """One served model. The fields from `root` on are extensions. `max_model_len` is null while the engine loads."""

    id: str
    created: int
    root: str
    max_model_len: int | None
    default_sampling_params: SamplingDefaults
    object: Literal["model"] = "model"
    owned_by: str = "weft"
    shutdown_date: None = None
    parent: None = None


class ModelList(msgspec.Struct):
    """All served models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
