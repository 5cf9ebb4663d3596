"""What people type for a model, and where that is: on this disk, on the hub, or at an address.

A path that exists comes first, then what was fetched from a web server, then the short names of models.json, then what
the hub or a web server has. Asks nobody.
"""

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from weft.engine.wire.machine import user_folder
from weft.server.library.download import LibraryError


class KnownModel(msgspec.Struct, frozen=True):
    """A model with a short name; what it takes is about right."""

    name: str
    source: str
    use: str
    licence: str
    file_bytes: int
    memory_bytes: int
    context: int


MAX_REPOSITORY_CHARS = 96
"""The hub has no longer names, and no disk takes them for long."""
MAX_STEP_CHARS = 200
"""Of a folder or file."""


@dataclass(frozen=True, slots=True)
class OnHub:
    """A repository of the hub.

    Attributes:
        file: Which GGUF model of it, as its type or the name of its first file; None: its checkpoint, or else Q4_K_M.
    """

    repository: str
    file: str | None = None

    def __str__(self) -> str:
        return self.repository + (f":{self.file}" if self.file else "")


@dataclass(frozen=True, slots=True)
class OnWeb:
    """A GGUF file at an address, "" if only its `place` is known: where it lies in the library, and its name there."""

    url: str
    place: str

    def __str__(self) -> str:
        return self.place


Source = Path | OnHub | OnWeb

_WANTED = "a folder with config.json and safetensors, a GGUF file, or a hub id such as Qwen/Qwen3-0.6B"
_HUB = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/([^?#]+).*", re.IGNORECASE)
_AT_HUB = re.compile(
    r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+)|/(?:blob|resolve)/main/(.+\.gguf)|/tree/main)?/?", re.ASCII | re.IGNORECASE
)
_PLAIN = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?::([\w.-]+))?", re.ASCII)
_OF_OLLAMA = re.compile(r"[\w.-]+(/[\w.-]+)*:[\w.-]+", re.ASCII)


@cache
def known_models() -> tuple[KnownModel, ...]:
    """The models with short names, the smallest first."""
    data = Path(__file__).with_name("models.json").read_bytes()
    return msgspec.json.decode(data, type=tuple[KnownModel, ...])


def known(name: str) -> KnownModel | None:
    """The model of a short name; None: it is none."""
    short = name.removeprefix("library/").removesuffix(":latest").lower()
    return next((model for model in known_models() if model.name == short), None)


def parse(name: str, here: Iterable[str] = ()) -> Source:
    """Where a model is.

    Args:
        here: Further names, for suggestions.

    Raises:
        LibraryError: Nothing is called so; it says what is called alike.
    """
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return Path(path)
    return OnWeb("", name) if is_place(name) else elsewhere(name, here)


def models_folder() -> Path:
    """Where models of web servers are."""
    return user_folder("XDG_DATA_HOME", ".local", "share") / "models"


def is_place(name: str) -> bool:
    """Whether this is a file of that folder, and no path that leads out of it."""
    is_inside = not os.path.isabs(name) and ".." not in Path(name).parts
    return is_inside and os.path.isfile(models_folder() / name)


def elsewhere(name: str, here: Iterable[str] = ()) -> OnHub | OnWeb:
    """As `parse`, for a name that is none of a path."""
    if (short := known(name)) is not None:
        name = short.source
    if of_hub := _HUB.fullmatch(name):
        if (match := _AT_HUB.fullmatch(of_hub[1])) is None:
            raise LibraryError(f"no model of the hub: {name} (its branch main, a GGUF file there, or org/repo:Q4_K_M)")
        return _on_hub(match[1], match[2] or (unquote(match[3]) if match[3] else None))
    if re.match(r"https?://", name, re.IGNORECASE):
        return _on_web(name)
    match = _PLAIN.fullmatch(name)
    is_family = any(model.name.startswith(f"{name.lower()}:") for model in known_models())
    has_no_owner = "/" not in name and (":" in name or is_family)
    if match is None or match[1].lower().endswith(".gguf") or match[2] == "latest" or has_no_owner:
        advice = alike(name, here)
        if not advice and _OF_OLLAMA.fullmatch(name):
            advice = f": this is how Ollama names models; Weft wants {_WANTED}, or a name that `weft pull` lists"
        raise LibraryError(f"no such {'file' if name.lower().endswith('.gguf') else 'folder'}: {name}{advice}")
    return _on_hub(match[1], match[2])


def _on_hub(repository: str, file: str | None) -> OnHub:
    if len(repository) > MAX_REPOSITORY_CHARS:
        raise LibraryError(
            f"no model of the hub: its name must have at most {MAX_REPOSITORY_CHARS} characters, got {len(repository)}"
        )
    if any(len(step) > MAX_STEP_CHARS for step in (file or "").split("/")):
        raise LibraryError(f"no file of the hub: its name must have at most {MAX_STEP_CHARS} characters")
    return OnHub(repository, file)


def _on_web(url: str) -> OnWeb:
    parts = urlsplit(url)
    steps = [unquote(step) for step in parts.path.split("/")[1:]]
    is_odd = any(step in ("", ".", "..") or "/" in step or not step.isprintable() for step in (*steps, parts.netloc))
    if is_odd or "@" in parts.netloc or not steps[-1].lower().endswith(".gguf"):
        raise LibraryError(f"no address of a GGUF file: {url} (it should end in .gguf)")
    return OnWeb(url, "/".join((parts.netloc, *steps)))


def alike(name: str, here: Iterable[str] = ()) -> str:
    """A question about the nearest names, with a space before it; empty if none is near."""
    names = {known.lower(): known for each in known_models() for known in (each.name, each.source)}
    names |= {each.lower(): each for each in here}
    near = [each for each in names if each.startswith(f"{name.lower()}:")]
    near += [each for each in difflib.get_close_matches(name.lower(), names, 3, 0.7) if each not in near]
    return f" (did you mean {' or '.join(names[each] for each in near[:3])}?)" if near else ""
