"""Models of the hub, in the cache that its own tools use (`HF_HOME`): what is there, what is missing, and its download.

A snapshot in the cache is a folder of links to files that are named by their content. Files are linked once all are
whole and checked, weights last. So a folder with all parts of its weights is complete. The branch main is moved to what
was fetched only after that.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import quote

from weft.engine.gguf.file import GgufError, parts
from weft.engine.gguf.folder import DEFAULT_TAG, choose
from weft.engine.gguf.mmproj import choose_mmproj, is_mmproj
from weft.server.library.contents import is_whole
from weft.server.library.download import LibraryError, NotHereError, Remote, Report, download, held
from weft.server.library.names import OnHub, alike
from weft.server.text.shield import one_line

PATTERNS = (
    *("*.json", "*.jinja", "*.safetensors", "*.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "*.spm"),
)
"""Files of a checkpoint; of subfolders those of sentence-transformers, such as 1_Pooling. Never code."""
ADAPTER_PATTERNS = ("adapter_config.json", "adapter_model.safetensors")
_LEFT_OUT = ("[!0-9]*/*", "consolidated*")
TORCH_PATTERNS = ("pytorch_model*.bin",)
"""Fetched besides where there are no safetensors."""
CONFIG_PATTERNS = ("config.json", "generation_config.json", "modules.json", "sentence_bert_config.json")
"""Files that tell what a model is for and how much memory it takes: a few kB."""
_LIST_S = 10.0
"""How long the hub may take to name the files of a repository."""
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_WEIGHTS = (".safetensors", ".bin", ".gguf")


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository's branch main, by name."""

    repository: str
    revision: str
    files: Mapping[str, Remote]

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """The names that a pattern matches, and none of those that are left out."""
        wanted = [name for name in self.files if any(fnmatch(name, pattern) for pattern in patterns)]
        return [name for name in wanted if not any(fnmatch(name, pattern) for pattern in _LEFT_OUT)]

    def chosen(self, tag: str | None, *, is_seeing: bool = True) -> list[str]:
        """The files of one model: those of the checkpoint, or one GGUF model with all its parts, and then what sees.

        Args:
            is_seeing: Whether what sees is wanted beside a GGUF model.

        Raises:
            LibraryError: There is none, or more than one that would do.
        """
        if tag is None and "config.json" in self.files:
            names = self.matching(PATTERNS)
            if not any(name.endswith(".safetensors") for name in names):
                names += self.matching(TORCH_PATTERNS)
            if any(name.endswith(_WEIGHTS) for name in names):
                return names
        try:
            model = choose(self.files, tag)
            beside = choose_mmproj(self.files, model[0]) if is_seeing else None
            return [*model, beside] if beside else model
        except GgufError as error:
            raise LibraryError(f"{self.repository}: {error}") from None


def repository_folder(repository: str) -> Path:
    """Where the hub's cache has a repository."""
    from huggingface_hub import constants  # not imported before it is needed

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def repositories() -> list[str]:
    """Those of which something is in the cache."""
    folders = repository_folder("").parent.glob("models--*")
    return [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]


def snapshot(repository: str) -> Path | None:
    """The folder of the branch main in the cache; None: there is none."""
    folder = repository_folder(repository)
    with contextlib.suppress(OSError, ValueError):
        found = folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="ascii").strip()
        return found if found.is_dir() else None
    return None


def cached(source: OnHub, usual: str | None = DEFAULT_TAG) -> Path | None:
    """The folder of a checkpoint or the first file of a GGUF model that is in the cache as a whole.

    Args:
        usual: The GGUF model that is meant where none is named; None: the only one that is in the cache will do.
    """
    folder = snapshot(source.repository)
    if folder is not None and source.file is None and is_whole(folder):
        return folder
    return _cached_gguf(folder, source.file or usual) if folder else None


def _cached_gguf(folder: Path, tag: str | None) -> Path | None:
    with contextlib.suppress(GgufError):
        names = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf") if file.exists()]
        first = folder / choose(names, tag)[0]
        return first if parts(first) else None
    return None


def listing(repository: str) -> Listing:
    """Ask the hub for a repository's files.

    Raises:
        LibraryError: It cannot be asked, or has no such repository.
    """
    from huggingface_hub import HfApi, constants, errors, get_token

    fault = ""
    try:
        info = HfApi().model_info(repository, timeout=_LIST_S, files_metadata=True)
    except errors.GatedRepoError:
        fault = "the hub asks for permission: accept its terms there and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        fault = f"no such model on the hub{alike(repository, repositories())}, or it is private (set HF_TOKEN)"
    except errors.OfflineModeIsEnabled:
        fault = "not in the cache, and HF_HUB_OFFLINE forbids to ask the hub"
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        fault = f"download failed: {one_line(str(error).partition(chr(10))[0]) or type(error).__name__}"
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # of httpx or httpx2: there was no answer
        told = one_line(str(error)) or type(error).__name__
        fault = f"not in the cache{alike(repository)}, and the hub cannot be reached ({told})"
    if fault:
        raise LibraryError(f"{repository}: {fault}")
    headers = {"Authorization": f"Bearer {token}"} if (token := get_token()) else {}
    address = f"{constants.ENDPOINT}/{repository}/resolve/{info.sha}"
    files = {}
    for file in info.siblings or ():
        kind, digest = ("sha256", file.lfs.sha256) if file.lfs else ("git", file.blob_id)
        size, name = file.lfs.size if file.lfs else file.size, file.rfilename
        if size is not None and _HASH.fullmatch(digest or "") and not {"", "..", "/"} & {*name.split("/"), name[:1]}:
            files[name] = Remote(f"{repository}/{name}", f"{address}/{quote(name)}", size, f"{kind}:{digest}", headers)
    if not _HASH.fullmatch(info.sha or "") or not files:
        raise LibraryError(f"{repository}: the hub names no files with their lengths and checksums")
    return Listing(repository, str(info.sha), files)


def fetch(
    source: OnHub,
    report: Report,
    check: Callable[[Path], None],
    *,
    is_plan: bool = False,
    is_seeing: bool = True,
) -> Path:
    """Download what is missing of a model.

    Args:
        check: Called with the folder of a checkpoint before its weights are fetched; raises what speaks against it.
        is_plan: Fetch the configuration of a checkpoint alone.
        is_seeing: Fetch what sees of a GGUF model, too.

    Returns:
        The folder of the checkpoint, or the first file of the GGUF model.

    Raises:
        LibraryError: It cannot be fetched.
    """
    found = listing(source.repository)
    names = found.chosen(source.file, is_seeing=is_seeing)
    is_gguf = names[0].lower().endswith(".gguf")
    with _locked(source.repository):
        if not is_gguf:
            check(_bring(found, found.matching(CONFIG_PATTERNS), report))
        if is_gguf or not is_plan:
            _bring(found, names, report)
        if is_gguf or not is_plan or snapshot(source.repository) is None:
            _move_main(found)
    folder = repository_folder(source.repository) / "snapshots" / found.revision
    return folder / names[0] if is_gguf else folder


def fetch_adapter(repository: str, report: Report) -> Path:
    """The folder of an adapter, fetched unless it is in the cache. Raises LibraryError."""
    folder = snapshot(repository)
    if folder is not None and all((folder / name).is_file() for name in ADAPTER_PATTERNS):
        return folder
    found = listing(repository)
    with _locked(repository):
        folder = _bring(found, found.matching(ADAPTER_PATTERNS), report)
        _move_main(found)
    return folder


def remove(source: OnHub) -> None:
    """Remove a model from the cache; of a repository with several GGUF models the others stay.

    Raises:
        LibraryError: Somebody is fetching a model of the repository.
    """
    folder, there = repository_folder(source.repository), snapshot(source.repository)
    with _locked(source.repository, waits=False):
        if source.file:
            if there is None or (file := _cached_gguf(there, source.file)) is None:
                raise NotHereError(f"{source} is not in the library")
            for part in parts(file):
                content = part.parent / os.readlink(part) if part.is_symlink() else part
                part.unlink()
                content.unlink(missing_ok=True)
            others = [each.name for each in folder.glob("snapshots/**/*") if each.exists()]
            if any(name.endswith(_WEIGHTS) and not is_mmproj(name) for name in others):
                return
        (folder / "refs" / "main").unlink(missing_ok=True)  # first, so that nobody finds a half
        shutil.rmtree(folder)


def _locked(repository: str, *, waits: bool = True) -> contextlib.AbstractContextManager[None]:
    folder = repository_folder(repository)
    return held(folder.parent / ".locks" / folder.name / "weft.lock", repository, waits=waits)


def _bring(found: Listing, names: Sequence[str], report: Report) -> Path:
    """Download and link files, weights last."""
    folder = repository_folder(found.repository)
    made = folder / "snapshots" / found.revision
    names = sorted(names, key=lambda name: (name.endswith(_WEIGHTS), name))
    blobs = {made / name: folder / "blobs" / found.files[name].digest.partition(":")[2] for name in names}
    download({blobs[made / name]: found.files[name] for name in names}, found.repository, report)
    for link, blob in blobs.items():
        if not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)  # its content was removed
            link.symlink_to(os.path.relpath(blob, link.parent))
    return made


def _move_main(found: Listing) -> None:
    """Make what was fetched the branch main of the cache."""
    ref = repository_folder(found.repository) / "refs" / "main"
    ref.parent.mkdir(parents=True, exist_ok=True)
    scratch = ref.with_name(f"main.{os.getpid()}")
    scratch.write_text(found.revision, encoding="ascii")
    scratch.replace(ref)
