"""Wire types of GET /v1/models: one model and the list of all models."""

from typing import Literal

import msgspec
from pydantic import Field

from weft.engine.shared.adapters import MAX_FOLDER_CHARS
from weft.server.model_entry import ModelName
from weft.server.schemas.common import WireModel


class SamplingDefaults(msgspec.Struct, omit_defaults=True):
    """The checkpoint's own defaults for fields that a request leaves out. An extension."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ModelCard(msgspec.Struct):
    """One served model. The fields from `root` on are extensions. `max_model_len` is null while the engine loads.

    Attributes:
        root: The model's own name; of an adapter its folder.
        parent: Of an adapter, the own name of its model.
        state: unloaded, loading, ready, unloading or failed.
        memory_bytes: What it takes while it is loaded, if that was planned.
        last_used: When a model that is loaded on demand last worked, in seconds since 1970.
    """

    id: str
    created: int
    root: str
    max_model_len: int | None
    default_sampling_params: SamplingDefaults
    object: Literal["model"] = "model"
    owned_by: str = "weft"
    state: str = "ready"
    memory_bytes: int | None = None
    last_used: float | None = None
    shutdown_date: None = None
    parent: str | None = None


class ModelList(msgspec.Struct):
    """All served models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class ModelBody(WireModel):
    """The body of POST /v1/models/load and /unload."""

    model: ModelName


class AliasBody(ModelBody):
    """The body of POST /v1/models/alias."""

    alias: ModelName


class LoadAdapterBody(WireModel):
    """The body of POST /v1/load_lora_adapter, as vLLM has it.

    Attributes:
        model: Which of several models it belongs to; an extension. None: the first one.
    """

    lora_name: ModelName
    lora_path: str = Field(min_length=1, max_length=MAX_FOLDER_CHARS)
    load_inplace: bool = False
    model: ModelName | None = None


class UnloadAdapterBody(WireModel):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: ModelName


class ModelCondition(msgspec.Struct):
    """What has become of a model."""

    model: str
    state: str
    memory_bytes: int | None
