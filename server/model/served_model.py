"""Defines a served model, and maps the names that clients may use to the served models."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.engine.shared.adapters import Adapter
from weft.engine.shared.messages import EngineInfo
from weft.server.errors import EngineRestartingError
from weft.server.formats.detection import OutputFormats, choose_formats
from weft.server.model.generation_defaults import GenerationDefaults, read_generation_defaults
from weft.server.model.vector_prompts import NO_PROMPTS, VectorPrompts, read_vector_prompts
from weft.server.models.engine_client import EngineClient
from weft.server.settings import Settings
from weft.server.text.text_tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model: the engine that runs it, and the text side of its checkpoint.

    Attributes:
        name: The model's own name. Clients may use other names for it, too.
        adapter: What the engine applies; None: the base model.
        on_demand: Whether it may be not loaded, in which case its `engine_client` has it loaded.
        prompts: Texts that the checkpoint wants before those whose vectors are made.
    """

    name: str
    engine_client: EngineClient
    tokenizer: TextTokenizer
    formats: OutputFormats
    defaults: GenerationDefaults
    adapter: Adapter | None = None
    prompts: VectorPrompts = NO_PROMPTS
    on_demand: bool = False

    @property
    def engine_info(self) -> EngineInfo:
        """What its engine reported in the handshake.

        Raises:
            EngineRestartingError: No engine is connected.
        """
        info = self.engine_client.info
        if info is None:
            raise EngineRestartingError("the engine is loading or restarting; try again in a moment")
        return info


def served_models(
    engine_client: EngineClient, tokenizer: TextTokenizer, settings: Settings
) -> Mapping[str, ServedModel]:
    """Map each served name to the one model that the settings describe; see `served_model`."""
    names = settings.served_model_name
    return dict.fromkeys(names, served_model(engine_client, tokenizer, settings)) if names else {}


def served_model(
    engine_client: EngineClient, tokenizer: TextTokenizer, settings: Settings, *, on_demand: bool = False
) -> ServedModel:
    """The one model that the settings describe, under the first of its names.

    Args:
        engine_client: May be disconnected; requests then get 503.
        settings: `model` is the checkpoint folder, which holds the sampling defaults; None: no defaults.
    """
    defaults = read_generation_defaults(Path(settings.model)) if settings.model else GenerationDefaults()
    prompts = read_vector_prompts(Path(settings.model)) if settings.model else NO_PROMPTS
    formats = choose_formats(tokenizer.template_source(has_tools=True), settings.tool_format, tokenizer.added_id)
    name = settings.served_model_name[0]
    return ServedModel(name, engine_client, tokenizer, formats, defaults, prompts=prompts, on_demand=on_demand)
