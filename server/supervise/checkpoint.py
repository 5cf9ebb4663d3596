"""Turns MODEL into a local checkpoint folder, and checks that its tokenizer and chat template fit the model.

Downloads only configuration, tokenizer, chat template, safetensors and the folders of sentence-transformers, and never
code. Pickled weights are downloaded only where there are no safetensors. A cached model needs no network. A GGUF file
gets a folder by `weft.engine.gguf.folder`.

Refuses a model that the engine cannot run, by its config.json and before its weights are downloaded. The engine checks
everything else.
"""

import contextlib
import logging
import pathlib
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from weft.engine.families.registry import identify
from weft.engine.families.tasks import own_task
from weft.engine.gguf.file import GgufError, parts
from weft.engine.gguf.folder import DEFAULT_TAG, choose, made_folder, stem
from weft.engine.wire.errors import ModelError
from weft.engine.wire.options import adapter_files
from weft.engine.wire.waiting_threads import WaitingThreads
from weft.server.settings import Settings, StartError
from weft.server.supervise.child import python_command
from weft.server.text.chat_template import BROKEN, NO_TEMPLATE, ChatTemplate, ChatTemplateError, ChatTemplates
from weft.server.text.shield import one_line
from weft.server.text.template_files import TemplateFileError, read_text
from weft.server.text.template_process import processes

T = TypeVar("T")
logger = logging.getLogger(__name__)

FOLDER_S = 30.0
"""How long a disk may take to say what an adapter's folder holds."""
DEMO_MODEL = pathlib.Path(__file__).parents[1] / "demo_model"
DEMO_NAME = "weft-demo"
PATTERNS = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "*.txt"]
"""Files to download from the hub; of subfolders those of sentence-transformers, such as 1_Pooling."""
ADAPTER_PATTERNS = ["adapter_config.json", "adapter_model.safetensors"]
LEFT_OUT = ["[!0-9]*/*", "consolidated*"]
TORCH_PATTERNS = ["pytorch_model*.bin"]
"""Fetched besides where there are no safetensors."""
CONFIG_PATTERNS = ["config.json", "generation_config.json", "modules.json", "sentence_bert_config.json"]
"""Files that tell what a model is for and how much memory it takes: a few kB."""

_WANTED = "a folder with config.json and safetensors, a GGUF file, or a hub id such as Qwen/Qwen3-0.6B"
_LIST_S = 10.0
"""How long the hub may take to name the files of a repository."""
_GGUF_ON_HUB = re.compile(r"(\w[\w.-]*/[\w.-]*gguf[\w.-]*)(?::([\w.-]+))?", re.ASCII | re.IGNORECASE)


def find(
    settings: Settings, place: str = "model", *, is_plan: bool = False, tell: Callable[[str], None] = logger.warning
) -> dict[str, object]:
    """The folders of one model, its draft and its adapters, by setting; fetches what is missing.

    Args:
        place: What names the model, for errors.
        tell: Called with what the operator should know of it.

    Raises:
        StartError: See `resolve`; or the tokenizer does not fit the model.
    """
    model = resolve(settings.model, place, is_plan=is_plan, model_impl=settings.model_impl)
    template = resolve_template(settings.chat_template, place)
    for note in check_tokenizer(model, settings.task, template):
        tell(note)
    draft = resolve_draft(settings.speculative, is_plan=is_plan, model_impl=settings.model_impl)
    if is_plan:  # which counts slots, not adapters
        return {"model": str(model), "speculative": draft, "chat_template": template and str(template)}
    adapters = {name: str(_resolve_adapter(name, source)) for name, source in settings.lora.items()}
    found = {"model": str(model), "speculative": draft, "lora": adapters}
    return {**found, "chat_template": template and str(template)}


def resolve(
    model: str | None, setting: str = "model", *, is_plan: bool = False, model_impl: str = "auto"
) -> pathlib.Path:
    """The checkpoint folder, absolute.

    Args:
        model: A local folder, a GGUF file, a hub id (`org/repo-GGUF:Q4_K_M` for one file of several), or None for the
            demo model of the package.
        setting: The name of the setting, for errors.
        is_plan: Download only the configuration, which is not enough to serve.
        model_impl: The setting of that name. Unless it is native, architectures without a family are left to the
            engine.

    Raises:
        StartError: There is no such folder, the engine cannot run the checkpoint, or the download fails.
    """
    if model is None:
        return _check(DEMO_MODEL, setting, model_impl)
    folder = pathlib.Path(model).expanduser()
    if folder.is_dir():
        has_gguf = any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))
        return (
            _of_gguf(model, folder, setting, model_impl) if has_gguf else _check(folder.resolve(), setting, model_impl)
        )
    if folder.is_file() and folder.suffix.lower() == ".gguf":
        return _of_gguf(model, folder, setting, model_impl)
    if found := gguf_on_hub(model):
        return _of_gguf(model, _download_gguf(*found, setting), setting, model_impl)
    if folder.suffix.lower() == ".gguf":
        raise StartError(f"{setting}: no such file: {model}")
    if not is_hub_id(model):
        is_ollamas = re.fullmatch(r"[\w.-]+(/[\w.-]+)*:[\w.-]+", model, re.ASCII) is not None
        advice = f": this is how Ollama names models; Weft wants {_WANTED}" if is_ollamas else ""
        raise StartError(f"{setting}: no such folder: {model}{advice}")
    if not is_plan and not _is_cached(model):
        _ask_engine(_check(_download(model, setting, CONFIG_PATTERNS), setting, model_impl), setting, model_impl)
    folder = _download(model, setting, CONFIG_PATTERNS if is_plan else PATTERNS)
    if not is_plan and not any(folder.glob("*.safetensors")):
        folder = _download(model, setting, PATTERNS + TORCH_PATTERNS)
    return _check(folder, setting, model_impl)


def resolve_draft(speculative: str | None, *, is_plan: bool = False, model_impl: str = "auto") -> str | None:
    """`resolve` for the setting `speculative`, which may also be "ngram" or None."""
    is_model = speculative not in (None, "ngram")
    return str(resolve(speculative, "speculative", is_plan=is_plan, model_impl=model_impl)) if is_model else speculative


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


def _resolve_adapter(name: str, source: str) -> pathlib.Path:
    """The folder of an adapter, absolute; from the hub if there is none here. Raises StartError."""
    folder, setting = pathlib.Path(source).expanduser(), f"lora: {name}"
    if not _answered(folder.is_dir, folder, setting) and is_hub_id(source):
        folder = _download(source, setting, ADAPTER_PATTERNS)

    def checked() -> pathlib.Path:
        adapter_files(found := folder.resolve())
        return found

    try:
        return _answered(checked, folder, setting)
    except ModelError as error:
        raise StartError(f"{setting}: {error}") from None


def _answered(look: Callable[[], T], folder: pathlib.Path, setting: str) -> T:
    """What a look at a folder returns; raises StartError if its disk hangs."""
    try:
        return WaitingThreads("disk", 1).submit(look).result(FOLDER_S)
    except TimeoutError:
        raise StartError(f"{setting}: the disk of {folder} does not answer within {FOLDER_S:g} s") from None


def served_name(model: str | None) -> str:
    """The default of `served_model_name`: the hub id, or the folder's or file's own name."""
    if model is None:
        return DEMO_NAME
    folder = pathlib.Path(model).expanduser()
    if folder.is_file():
        return stem(folder.name)
    return folder.resolve().name if folder.is_dir() else model


def is_hub_id(model: str) -> bool:
    """Whether this has the form of a hub id."""
    return re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", model, re.ASCII) is not None


def gguf_on_hub(model: str) -> tuple[str, str | None] | None:
    """The repository of GGUF files and what the file is called in it, if this is such a name and no path."""
    found = _GGUF_ON_HUB.fullmatch(model)
    return (found[1], found[2]) if found and not found[1].lower().endswith(".gguf") else None


def cached_gguf(repository: str, tag: str | None) -> pathlib.Path | None:
    """The file of that name, or the only one, if it has been fetched with all its parts."""
    from huggingface_hub import snapshot_download  # slow to import
    from huggingface_hub.errors import LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError, GgufError):
        folder = pathlib.Path(snapshot_download(repository, allow_patterns=["*.gguf"], local_files_only=True))
        file = folder / choose([str(file.relative_to(folder)) for file in folder.rglob("*.gguf")], tag)[0]
        return file if parts(file) else None
    return None


def _check(folder: pathlib.Path, setting: str, model_impl: str) -> pathlib.Path:
    """Return the folder if the engine can run its model."""
    if not (folder / "config.json").is_file():
        raise StartError(f"{setting}: no config.json in {folder}")
    try:
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


def _of_gguf(model: str, found: pathlib.Path, setting: str, model_impl: str) -> pathlib.Path:
    """The folder that is made of a GGUF file, or of the only model in a folder of such files."""
    try:
        if found.is_dir():
            found /= choose([file.name for file in found.glob("*.gguf")], None)[0]
        made = made_folder(found)
    except GgufError as error:
        raise StartError(f"{setting}: {model}: {error}") from None
    return _check(made, setting, model_impl)


def _download_gguf(repository: str, tag: str | None, setting: str) -> pathlib.Path:
    """A file of a repository, fetched with the other parts of its model unless it is in the cache."""
    if found := cached_gguf(repository, tag or DEFAULT_TAG):
        return found
    try:
        with _faults_told(repository, setting):
            listed = _listed(repository)
        names = choose(listed, tag)
    except GgufError as error:
        raise StartError(f"{setting}: {repository}: {error}") from None
    except StartError:
        if found := cached_gguf(repository, tag):  # the only model that has been fetched
            return found
        raise
    return _download(repository, setting, names, left_out=[]) / names[0]


def _listed(repository: str) -> list[str]:
    """The names of a repository's files, asked for once: `list_repo_files` tries for half a minute."""
    from huggingface_hub import HfApi  # slow to import

    return [file.rfilename for file in HfApi().model_info(repository, timeout=_LIST_S).siblings or ()]


def _is_cached(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def _download(model: str, setting: str, patterns: list[str], left_out: list[str] = LEFT_OUT) -> pathlib.Path:
    from huggingface_hub import snapshot_download  # slow to import

    with _faults_told(model, setting):
        return pathlib.Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=left_out))


@contextlib.contextmanager
def _faults_told(model: str, setting: str) -> Iterator[None]:
    """Turn what the hub or the way to it says into a `StartError`."""
    from huggingface_hub import errors
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        yield
        return
    except GatedRepoError:
        fault = "the hub asks for permission: accept its terms there and set HF_TOKEN"
    except RepositoryNotFoundError:
        fault = "no such model on the hub, or it is private (set HF_TOKEN)"
    except LocalEntryNotFoundError:
        fault = "no such folder, not in the cache, and the hub cannot be reached"
    except (HfHubHTTPError, OSError) as error:
        fault = f"download failed: {one_line(str(error).partition(chr(10))[0]) or type(error).__name__}"
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # of httpx or httpx2: there was no answer
        fault = f"not in the cache, and the hub cannot be reached ({one_line(str(error)) or type(error).__name__})"
    raise StartError(f"{setting}: {model}: {fault}")


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
    vocab_size = identify(folder).fields.optional_integer("vocab_size")
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
    return notes if templates.faults or templates.own(has_tools=True) else [*notes, NO_TEMPLATE]


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
