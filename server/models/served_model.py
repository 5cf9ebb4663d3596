"""Defines a served model with its defaults and prompts, and the served models by every name that clients may use.

Reads the model's default sampling parameters from generation_config.json, and the prompts that it wants before texts
from sentence-transformers' configuration. If such a file is missing or broken, there are no defaults or prompts and
serving goes on; many checkpoints have none.
"""

import logging
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec
from typing_extensions import override

from weft.engine.wire.messages import EngineInfo
from weft.engine.wire.options import Adapter
from weft.server.errors import EngineRestartingError
from weft.server.formats.detection import OutputFormats, choose_formats, renderer
from weft.server.models.engine_client import EngineClient
from weft.server.models.fleet import Fleet
from weft.server.models.seq2seq import Seq2Seq, read_seq2seq
from weft.server.models.whisper import Whisper, read_whisper
from weft.server.pictures.process import PictureProcess
from weft.server.sampling import NAMES, GenerationDefaults, sampling_fault
from weft.server.settings import Settings
from weft.server.text.template_files import TemplateFileError, read_object
from weft.server.text.text_tokenizer import TextTokenizer

_log = logging.getLogger(__name__)


def read_generation_defaults(checkpoint: pathlib.Path) -> GenerationDefaults:
    """Read generation_config.json in the checkpoint folder. Skips values that no request may have, with a warning."""
    path = checkpoint / "generation_config.json"
    try:
        config = read_object(path)
    except TemplateFileError as exc:
        _log.warning("%s is not used: %s", path, exc)
        return GenerationDefaults()
    stated = {name: value for name in NAMES if (value := config.get(name)) is not None}
    assumed = config.get("assumed")  # in a folder that was made of a GGUF file
    assumed = {name: assumed[name] for name in NAMES if name in assumed} if isinstance(assumed, dict) else {}
    found = {}
    for name, value in {**assumed, **stated}.items():
        if fault := sampling_fault(name, value):
            _log.warning("%s: %s is not used: %s", path, name, fault)
        else:
            found[name] = value
    return GenerationDefaults(**found, assumed=frozenset(assumed) - frozenset(stated))


@dataclass(frozen=True, slots=True)
class VectorPrompts:
    """What a checkpoint wants before texts.

    Attributes:
        texts: Prompts by name.
        default: The name of the prompt that a text gets if it names none; None: it gets none.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None


NO_PROMPTS = VectorPrompts()


class _PromptsFile(msgspec.Struct):
    prompts: dict[str, str | None] = {}
    default_prompt_name: str | None = None


def read_vector_prompts(checkpoint: pathlib.Path) -> VectorPrompts:
    """Read config_sentence_transformers.json in the checkpoint folder; no prompts if it is missing or broken."""
    path = checkpoint / "config_sentence_transformers.json"
    try:
        file = msgspec.convert(read_object(path), _PromptsFile)
    except (TemplateFileError, msgspec.ValidationError) as exc:
        _log.warning("%s is not used: %s", path, exc)
        return NO_PROMPTS
    texts = {name: text or "" for name, text in file.prompts.items()}
    return VectorPrompts(texts, file.default_prompt_name if file.default_prompt_name in texts else None)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model: the engine that runs it, and the text side of its checkpoint.

    Attributes:
        name: The model's own name. Clients may use other names for it, too.
        adapter: What the engine applies; None: the base model.
        on_demand: Whether it may be not loaded, in which case its `engine_client` has it loaded.
        prompts: Texts that the checkpoint wants before those whose vectors are made.
        seq2seq: How it answers if it has an encoder; None without one.
        whisper: How its decoder begins if it is a Whisper.
        pictures: What reads pictures for it, if its engine sees any, and ends with that; None without a checkpoint.
    """

    name: str
    engine_client: EngineClient
    tokenizer: TextTokenizer
    formats: OutputFormats
    defaults: GenerationDefaults
    adapter: Adapter | None = None
    prompts: VectorPrompts = NO_PROMPTS
    on_demand: bool = False
    seq2seq: Seq2Seq | None = None
    whisper: Whisper | None = None
    pictures: PictureProcess | None = None

    @property
    def input_modalities(self) -> tuple[str, ...] | None:
        """`audio` if it hears, else `text`, and `image` if it sees.

        None before its first handshake, unless its files say that it hears.
        """
        if (info := self.engine_client.info) is None:
            return None if self.whisper is None else ("audio",)
        if info.audio is not None:
            return ("audio",)
        return ("text",) if info.picture_token is None else ("text", "image")

    @property
    def may_chat(self) -> bool:
        """Whether it generates from text, as far as that is known."""
        info = self.engine_client.info
        return self.input_modalities != ("audio",) and (info is None or info.task == "generate")

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


def served_model(
    engine_client: EngineClient, tokenizer: TextTokenizer, settings: Settings, *, on_demand: bool = False
) -> ServedModel:
    """The one model that the settings describe, under the first of its names.

    Args:
        engine_client: May be disconnected; requests then get 503.
        settings: `model` is the checkpoint folder, which holds the sampling defaults; None: no defaults.
    """
    defaults = read_generation_defaults(pathlib.Path(settings.model)) if settings.model else GenerationDefaults()
    seq2seq = read_seq2seq(pathlib.Path(settings.model)) if settings.model else None
    if seq2seq and not seq2seq.is_sampled:
        defaults = replace(defaults, temperature=0.0)
    defaults = defaults.with_stated(settings.default_sampling)
    if defaults.values():
        _log.info("requests that do not say are sampled with %s", defaults)
    prompts = read_vector_prompts(pathlib.Path(settings.model)) if settings.model else NO_PROMPTS
    template = tokenizer.template_source(has_tools=True)
    tokenizer.is_of_encoder = seq2seq is not None and not template
    formats = choose_formats(template, settings.tool_format, tokenizer.added_id, renderer(tokenizer))
    tokenizer.call_texts = formats.tools.call_texts if formats.tools else ()
    name = settings.served_model_name[0]
    whisper = read_whisper(pathlib.Path(settings.model), tokenizer) if settings.model else None
    pictures = PictureProcess(pathlib.Path(settings.model)) if settings.model else None
    answers = defaults, None, prompts, on_demand, seq2seq, whisper, pictures
    return ServedModel(name, engine_client, tokenizer, formats, *answers)


class LiveModels(Mapping[str, ServedModel]):
    """Each model under its own name, followed by the aliases that mean it now; then the adapters.

    Aliases may move, and adapters come and go.
    """

    def __init__(self, models: Mapping[str, ServedModel], fleet: Fleet) -> None:
        """Serve these models, by their own names."""
        self._models = models
        self._fleet = fleet

    @override
    def __getitem__(self, name: str) -> ServedModel:
        state = self._fleet.read()
        if (served := state.adapters.get(name)) is not None:
            return replace(self._models[served.model], adapter=served.adapter)
        return self._models[state.aliases.get(name, name)]

    @override
    def __iter__(self) -> Iterator[str]:
        state = self._fleet.read()
        for name in self._models:
            yield name
            yield from (alias for alias, meant in state.aliases.items() if meant == name)
        yield from state.adapters

    @override
    def __len__(self) -> int:
        state = self._fleet.read()
        return len(self._models) + len(state.aliases) + len(state.adapters)
