"""Turns MODEL into a local checkpoint folder, and checks that its tokenizer and chat template fit the model.

The library finds a model and fetches what is missing of it. A GGUF file gets a folder by `weft.engine.gguf.folder`.
Refuses a model that the engine cannot run, by its config.json and before its weights are downloaded. The engine checks
everything else.
"""

import logging
import os
import pathlib
import subprocess
from collections.abc import Callable
from functools import partial

import msgspec

from weft.engine.families.registry import identify, is_eagle, own_task
from weft.engine.gguf.file import GgufError
from weft.engine.gguf.folder import choose, made_folder, stem
from weft.engine.gguf.mmproj import mmproj_beside
from weft.engine.wire.errors import ModelError
from weft.engine.wire.machine import format_size
from weft.engine.wire.options import adapter_files
from weft.engine.wire.waiting_threads import WaitingThreads
from weft.server.library import hub, library
from weft.server.library.download import LibraryError, Report
from weft.server.library.names import OnHub, known, parse
from weft.server.settings import Settings, StartError
from weft.server.supervise.memory_shares import read_memories
from weft.server.supervise.spawn import python_command
from weft.server.text.chat_template import BROKEN, NO_TEMPLATE, ChatTemplate, ChatTemplateError, ChatTemplates
from weft.server.text.template_files import TemplateFileError, read_text
from weft.server.text.template_process import processes

logger = logging.getLogger(__name__)

FOLDER_S = 30.0
"""How long a disk may take to say what an adapter's folder holds."""
DEMO_MODEL = pathlib.Path(__file__).parents[1] / "demo_model"
DEMO_NAME = "weft-demo"
_LINES = library.Lines(logger.info)


def find(
    settings: Settings,
    place: str = "model",
    *,
    is_plan: bool = False,
    tell: Callable[[str], None] = logger.warning,
    report: Report = _LINES,
) -> dict[str, object]:
    """The folders of one model, its draft and its adapters, by setting; fetches what is missing.

    Args:
        place: What names the model, for errors.
        tell: Called with what the operator should know of it.
        report: Called with what has arrived.

    Raises:
        StartError: See `resolve`; or the tokenizer does not fit the model.
    """
    model_impl, check = settings.model_impl, partial(_check_fit, settings, place)
    model = resolve(
        settings.model,
        place,
        is_plan=is_plan,
        model_impl=model_impl,
        report=report,
        before_weights=check,
        pictures=settings.pictures,
        mmproj=settings.mmproj,
    )
    template = resolve_template(settings.chat_template, place)
    for note in check_tokenizer(model, settings.task, template):
        tell(note)
    draft = resolve_draft(settings.speculative, is_plan=is_plan, model_impl=model_impl, report=report)
    found: dict[str, object] = {"model": str(model), "speculative": draft, "chat_template": template and str(template)}
    if not is_plan:  # which counts slots, not adapters
        found["lora"] = {name: str(_resolve_adapter(name, source, report)) for name, source in settings.lora.items()}
    return found


def resolve(
    model: str | None,
    setting: str = "model",
    *,
    is_plan: bool = False,
    refresh: bool = False,
    model_impl: str = "auto",
    report: Report = _LINES,
    before_weights: Callable[[pathlib.Path], None] = lambda folder: None,
    pictures: bool = False,
    mmproj: str | None = None,
) -> pathlib.Path:
    """The checkpoint folder, absolute.

    Args:
        model: A name as `weft.server.library.names` reads it, or None for the demo model of the package.
        setting: The name of the setting, for errors.
        is_plan: Download only the configuration, which is not enough to serve.
        refresh: Fetch a newer version of a model that is there.
        model_impl: The setting of that name. Unless it is native, architectures without a family are left to the
            engine.
        report: Called with what has arrived.
        before_weights: Called with the folder of a checkpoint whose weights are to be fetched.
        pictures, mmproj: The settings of those names.

    Raises:
        StartError: There is no such model, the engine cannot run the checkpoint, or the download fails.
    """
    if mmproj and (model is None or not pictures):
        raise StartError(f"mmproj: {mmproj} needs a GGUF file as MODEL, and the setting pictures")
    if model is None:
        return _check(DEMO_MODEL, setting, model_impl)

    def check(folder: pathlib.Path) -> None:
        _check(folder, setting, model_impl)
        if not is_plan and not is_eagle(folder):
            _ask_engine(folder, setting, model_impl)
            before_weights(folder)

    try:
        seeing = pictures or refresh  # a refresh is for settings that are not known yet
        found = library.get(model, report, check, is_plan=is_plan, refresh=refresh, is_seeing=seeing)
    except LibraryError as error:
        raise StartError(f"{setting}: {error}") from None
    if found.is_file() or (any(found.glob("*.gguf")) and not any(found.glob("*.safetensors"))):
        return _of_gguf(model, found, setting, model_impl, pictures, mmproj)
    if mmproj:
        raise StartError(f"mmproj: {mmproj} needs a GGUF file as MODEL, and {model} is none")
    return _check(found.resolve(), setting, model_impl)


def resolve_draft(
    speculative: str | None, *, is_plan: bool = False, model_impl: str = "auto", report: Report = _LINES
) -> str | None:
    """`resolve` for the setting `speculative`, which may also be "ngram", "mtp" or None."""
    if speculative in (None, "ngram", "mtp"):
        return speculative
    return str(resolve(speculative, "speculative", is_plan=is_plan, model_impl=model_impl, report=report))


def resolve_template(file: str | None, place: str = "model") -> pathlib.Path | None:
    """The file of a chat template, absolute; None: the checkpoint's own is used.

    Raises:
        StartError: It cannot be read, or is not a valid template.
    """
    if file is None:
        return None
    path = pathlib.Path(file).expanduser().resolve()
    try:
        ChatTemplate(read_text(path))
        return path
    except TemplateFileError as error:
        fault = str(error)
    except ChatTemplateError as error:
        fault = f"{path}: {error}"
    raise StartError(f"{f'{place}: ' * (place != 'model')}chat_template: {fault}")


def _resolve_adapter(name: str, source: str, report: Report) -> pathlib.Path:
    """The folder of an adapter, absolute; from the hub if there is none here. Raises StartError."""
    folder = pathlib.Path(os.path.expanduser(source))
    disk = WaitingThreads("disk", 1)
    try:
        found = disk.submit(partial(parse, source)).result(FOLDER_S)
        if isinstance(found, OnHub):
            folder = hub.fetch_adapter(found.repository, report)
        folder = disk.submit(folder.resolve).result(FOLDER_S)
        disk.submit(partial(adapter_files, folder)).result(FOLDER_S)
        return folder
    except TimeoutError:
        fault = f"the disk of {folder} does not answer within {FOLDER_S:g} s"
    except (LibraryError, ModelError) as error:
        fault = str(error)
    raise StartError(f"lora: {name}: {fault}")


def served_name(model: str | None) -> str:
    """The default of `served_model_name`: the short name, the hub id, or the folder's or file's own name."""
    if model is None:
        return DEMO_NAME
    try:
        source = parse(model)
    except LibraryError:
        return model
    if isinstance(source, OnHub):
        return model if known(model) else str(source)
    file = source if isinstance(source, pathlib.Path) else pathlib.Path(source.place)
    return file.resolve().name if file.is_dir() else stem(file.name)


def _check(folder: pathlib.Path, setting: str, model_impl: str) -> pathlib.Path:
    """Return the folder if the engine can run its model, or draft with its head."""
    if not (folder / "config.json").is_file():
        raise StartError(f"{setting}: no config.json in {folder}")
    try:
        if setting != "speculative" or not is_eagle(folder):
            identify(folder, model_impl)
    except ModelError as error:
        raise StartError(f"{setting}: {error}") from None
    return folder


def _ask_engine(folder: pathlib.Path, setting: str, model_impl: str) -> None:
    """Refuse, in seconds, what transformers' modules cannot serve either. Weft's families need not be asked about."""
    if identify(folder, model_impl).switches is None:
        command = python_command("weft.engine.start.report", "check", str(folder), model_impl)
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if asked.returncode == 2:
            raise StartError(f"{setting}: {asked.stderr.strip().splitlines()[-1]}")


def _check_fit(settings: Settings, place: str, folder: pathlib.Path) -> None:
    """Refuse a model that this machine cannot hold, by its configuration. The engine finds other faults."""
    alone: dict[str, object] = {"models": {}, "served_model_name": ("it",), "speculative": None, "lora": {}}
    memory = read_memories(settings.model_copy(update={**alone, "model": str(folder)}), ["it"])["it"]
    needed = memory.weights_bytes + memory.activations_bytes + memory.least_kv_bytes
    if needed > memory.free_bytes:
        told = f"needs {format_size(needed)} of memory, and {format_size(memory.free_bytes)} are free"
        raise StartError(f"{place}: {settings.model} {told}: take a smaller model, or one in fewer bits")


def _of_gguf(
    model: str, found: pathlib.Path, setting: str, model_impl: str, pictures: bool, mmproj: str | None
) -> pathlib.Path:
    """The folder that is made of a GGUF file, or of the only model in a folder of such files, and of what sees."""
    try:
        if found.is_dir():
            found /= choose([file.name for file in found.glob("*.gguf")], None)[0]
        if mmproj:
            made = made_folder(found, _existing(mmproj))
        else:
            made = (_seeing_folder(found) if pictures else None) or made_folder(found)
    except GgufError as error:
        raise StartError(f"{setting}: {model}: {error}") from None
    return _check(made, setting, model_impl)


def _existing(mmproj: str) -> pathlib.Path:
    path = pathlib.Path(mmproj).expanduser()
    if not path.is_file():
        raise StartError(f"mmproj: no such file: {path}")
    return path


def _seeing_folder(file: pathlib.Path) -> pathlib.Path | None:
    """The folder of a model and the mmproj file beside it; None: there is none, or it is not for this model."""
    try:
        return made_folder(file, beside) if (beside := mmproj_beside(file)) else None
    except GgufError as error:
        logger.warning("only text is served: %s", error)
        return None


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[object] = {}


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def check_tokenizer(folder: pathlib.Path, task: str = "auto", template: pathlib.Path | None = None) -> list[str]:
    """What the operator should know of tokenizer and chat template, one sentence each.

    Reads only the files, in milliseconds: `weft serve` calls it before it starts anything, and `weft plan` and
    `weft doctor` report the same. Other missing and broken files are not reported here. Whether the tokenizer
    library can load the files is not checked. Nothing is said of chat templates where a model is not for text.

    Args:
        folder: A checkpoint that `resolve` has accepted.
        task: The setting of that name.
        template: A chat template in place of the checkpoint's.

    Raises:
        StartError: The tokenizer has more tokens than the model.
    """
    fields = identify(folder).fields
    vocab_size, reads_input = fields.optional_integer("vocab_size"), fields.flag("is_encoder_decoder", False)
    if task in ("auto", "generate"):
        processes().start()  # beside what is read first
    try:
        tokenizer = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerFile)
        config_file = folder / "tokenizer_config.json"
        config = msgspec.json.decode(config_file.read_bytes(), type=dict[str, object]) if config_file.exists() else {}
        own = own_task(folder) if task == "auto" else task
    except (OSError, msgspec.DecodeError, ModelError, LookupError, TypeError, ValueError, RecursionError):
        return []
    notes = [] if vocab_size is None else _compare(tokenizer, vocab_size)
    if own != "generate":
        return notes
    templates = ChatTemplates.load(folder, config, template)
    notes += [f"{fault}: {BROKEN}" for fault in templates.faults]
    has_template = templates.faults or templates.own(has_tools=True) or reads_input
    return notes if has_template else [*notes, NO_TEMPLATE]


def _compare(tokenizer: _TokenizerFile, vocab_size: int) -> list[str]:
    """Some fine-tuned models lack added tokens and still work. A model that lacks a part of the vocabulary does not."""
    added = {token.id for token in tokenizer.added_tokens}
    vocab = tokenizer.model.vocab
    ids = set(vocab.values() if isinstance(vocab, dict) else range(len(vocab))) - added
    num_ids = max(ids, default=-1) + 1
    if num_ids > vocab_size:
        raise StartError(
            f"model: the tokenizer does not fit the model: it has {num_ids:,} tokens, and config.json says vocab_size "
            f"{vocab_size:,}; take the tokenizer.json that belongs to the weights"
        )
    lacking = [token.content for token in tokenizer.added_tokens if token.id >= vocab_size]
    names = ", ".join(lacking[:5]) + " ..." * (len(lacking) > 5)
    return [f"the model has no token {names}: prompts with it are refused"] if lacking else []
