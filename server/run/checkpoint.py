"""Where the weights lie: turns MODEL into a local folder, downloading from the hub when it is no folder.

Fetches only what is read: configuration, tokenizer, chat template and safetensors, never code or pickles. What was
downloaded once serves without a network. Refuses at once, and before weights are downloaded, what config.json shows to
be no model that the engine has; the engine reads the rest.
"""

import pathlib
import re

from weft.engine.models.families.registry import identify
from weft.engine.shared.errors import ModelError
from weft.server.settings import StartError

DEMO_MODEL = pathlib.Path(__file__).parents[1] / "demo_model"
DEMO_NAME = "weft-demo"
PATTERNS = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "*.txt"]
"""Files that are fetched from the hub, those in folders inside the repository left out."""
CONFIG_PATTERNS = ["config.json", "generation_config.json"]
"""Files that say what a model takes and nothing else: a few kB."""

_WANTED = "a folder with config.json and safetensors, or a hub id such as Qwen/Qwen3-0.6B"


def resolve(model: str | None, setting: str = "model", *, is_plan: bool = False) -> pathlib.Path:
    """The checkpoint folder, absolute.

    Args:
        model: A local folder, a hub id, or None for the demo model of the package.
        setting: What a fault is told of.
        is_plan: Of a hub id fetch the configuration alone, which is not enough to serve it.

    Raises:
        StartError: There is no such folder, or it is no checkpoint that the engine has, or the hub does not give it.
    """
    if model is None:
        return _check(DEMO_MODEL, setting)
    folder = pathlib.Path(model).expanduser()
    if folder.is_dir():
        return _check(folder.resolve(), setting)
    if is_gguf(model):
        raise _no_gguf(model, setting)
    if not is_hub_id(model):
        is_ollamas = re.fullmatch(r"[\w.-]+(/[\w.-]+)*:[\w.-]+", model, re.ASCII) is not None
        advice = f": this is how Ollama names models; Weft wants {_WANTED}" if is_ollamas else ""
        raise StartError(f"{setting}: no such folder: {model}{advice}")
    if not is_plan and not _is_cached(model):
        _check(_download(model, setting, CONFIG_PATTERNS), setting)
    return _check(_download(model, setting, CONFIG_PATTERNS if is_plan else PATTERNS), setting)


def is_hub_id(model: str) -> bool:
    """Whether this can be the id of a model on the hub."""
    return re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", model, re.ASCII) is not None


def is_gguf(model: str) -> bool:
    """Whether the name is that of a file in llama.cpp's format, or of a repository of such."""
    return model.lower().endswith((".gguf", "-gguf"))


def served_name(model: str | None) -> str:
    """What the model is called in the API when no name was set: hub id as it is, folder by its own name."""
    if model is None:
        return DEMO_NAME
    folder = pathlib.Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def resolve_draft(speculative: str | None, *, is_plan: bool = False) -> str | None:
    """The same for the setting `speculative`, which may also name no folder at all."""
    is_model = speculative not in (None, "ngram")
    return str(resolve(speculative, "speculative", is_plan=is_plan)) if is_model else speculative


def _check(folder: pathlib.Path, setting: str) -> pathlib.Path:
    """The folder again, if the engine has such models."""
    if any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")):
        raise _no_gguf(str(folder), setting)
    if not (folder / "config.json").is_file():
        raise StartError(f"{setting}: no config.json in {folder}")
    try:
        identify(folder)
    except ModelError as error:
        raise StartError(f"{setting}: {error}") from None
    return folder


def _no_gguf(model: str, setting: str) -> StartError:
    return StartError(f"{setting}: {model}: GGUF files are not supported yet; Weft wants {_WANTED}")


def _is_cached(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def _download(model: str, setting: str, patterns: list[str]) -> pathlib.Path:
    from huggingface_hub import snapshot_download  # slow to import, and needed only here
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return pathlib.Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except GatedRepoError:
        fault = "the hub asks for permission: accept its terms there and set HF_TOKEN"
    except RepositoryNotFoundError:
        fault = "no such model on the hub, or it is private (set HF_TOKEN)"
    except LocalEntryNotFoundError:
        fault = "no such folder, not in the cache, and the hub cannot be reached"
    except (HfHubHTTPError, OSError) as error:
        fault = f"download failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    raise StartError(f"{setting}: {model}: {fault}")
