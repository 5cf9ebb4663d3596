"""GGUF files from web servers, in a folder of Weft's own: as `HOST/PATH` under `~/.local/share/weft/models`.

A server must say how long a file is. Nobody says what its checksum is; if its content changes while it is fetched, it
is fetched anew. Of a model in parts all of them are fetched.
"""

import glob
import hashlib
import os
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from weft.engine.gguf.file import GgufError, part_names, parts
from weft.server.library.download import CONNECT_S, SILENCE_S, LibraryError, Remote, Report, download, num_missing
from weft.server.library.hub import room_for
from weft.server.library.locks import held
from weft.server.library.names import OnWeb
from weft.server.text.shield import one_line


def models_folder() -> Path:
    """Where such models are, as the XDG Base Directory Specification places it."""
    given = os.environ.get("XDG_DATA_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".local" / "share") / "weft" / "models"


def is_here(place: str) -> bool:
    """Whether this is a file of the folder, and no path that leads out of it."""
    is_inside = not os.path.isabs(place) and ".." not in Path(place).parts
    return is_inside and (models_folder() / place).is_file()


def cached(place: str) -> Path | None:
    """The first file of a model that is there with all its parts."""
    try:
        return models_folder() / place if is_here(place) and parts(models_folder() / place) else None
    except GgufError:
        return None


def fetch(source: OnWeb, report: Report) -> Path:
    """Download what is missing of a model; its first file.

    Raises:
        LibraryError: It cannot be fetched.
    """
    file, address = models_folder() / source.place, urlsplit(source.url)
    folder, _, last = address.path.rpartition("/")
    with held(_lock(source.place), source.place):
        remotes = {}
        for name, url_name in zip(part_names(file.name), part_names(last), strict=True):
            remotes[file.with_name(name)] = _look(urlunsplit(address._replace(path=f"{folder}/{url_name}")), name)
        num_bytes = sum(num_missing(remote, target) for target, remote in remotes.items())
        room_for(num_bytes, file.parent, source.place, "XDG_DATA_HOME")
        for target, remote in reversed(remotes.items()):
            download(remote, target, report)
    return file


def remove(place: str) -> None:
    """Remove a model and what is left of tries to fetch it. Raises LibraryError if somebody is fetching it."""
    file = models_folder() / place
    with held(_lock(place), place, waits=False):
        for name in part_names(file.name):
            for each in (file.with_name(name), *file.parent.glob(f"{glob.escape(name)}.*.incomplete")):
                each.unlink(missing_ok=True)
    for folder in file.parents[: len(Path(place).parts) - 1]:
        if any(folder.iterdir()):
            break
        folder.rmdir()


def _lock(place: str) -> Path:
    return models_folder() / ".locks" / hashlib.sha256(place.encode()).hexdigest()[:16]


def _look(url: str, name: str) -> Remote:
    """Ask a server how long a file is, by asking for its first byte: not all answer a HEAD."""
    import httpx

    try:
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        with httpx.stream("GET", url, headers={"Range": "bytes=0-0"}, timeout=timeout, follow_redirects=True) as answer:
            answer.raise_for_status()
            told = answer.headers.get("content-range", "").rpartition("/")[2] if answer.status_code == 206 else None
            size = told or answer.headers.get("content-length", "")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fault = one_line(str(error).partition("\n")[0]) or type(error).__name__
        raise LibraryError(f"{name} cannot be fetched: {fault}") from None
    if not size.isdecimal() or not int(size):
        raise LibraryError(f"{name} cannot be fetched: the server does not say how long it is")
    tag = answer.headers.get("etag", "")
    state = tag or answer.headers.get("last-modified", "")
    return Remote(name, url, int(size), f"etag:{state}", {"If-Range": tag} if tag.startswith('"') else {})
