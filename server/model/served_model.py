"""The models that are served, each behind one name or several."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.engine.shared.messages import EngineInfo
from weft.server.errors import EngineRestartingError
from weft.server.formats.detection import OutputFormats, choose_formats
from weft.server.model.engine_client import EngineClient
from weft.server.model.generation_defaults import GenerationDefaults, read_generation_defaults
from weft.server.settings import Settings
from weft.server.text.text_tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model: the engine that runs it, and what its checkpoint says of text.

    Attributes:
        name: Its own name; clients may know it by others, too.
        adapter: The adapter that the engine is to put on the model; None for the model as it is.
    """

    name: str
    engine_client: EngineClient
    tokenizer: TextTokenizer
    formats: OutputFormats
    defaults: GenerationDefaults
    adapter: str | None = None

    @property
    def engine_info(self) -> EngineInfo:
        """What its engine is.

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
    """The one model that settings can name, behind each of its names.

    Args:
        engine_client: Connected or not; requests get 503 while it is not.
        settings: `model` is the checkpoint folder, where the model's own sampling defaults lie, or None for none.
    """
    defaults = read_generation_defaults(Path(settings.model)) if settings.model else GenerationDefaults()
    formats = choose_formats(tokenizer.template_source(has_tools=True), settings.tool_format, tokenizer.added_id)
    names = settings.served_model_name
    return {name: ServedModel(names[0], engine_client, tokenizer, formats, defaults) for name in names}
