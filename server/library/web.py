"""GGUF files from web servers, in a folder of Weft's own: as `HOST/PATH` under `~/.local/share/weft/models`.

A server must say how long a file is. Nobody says what its checksum is; if its content changes while it is fetched, it
is fetched anew. Of a model in parts all of them are fetched.
"""

import contextlib
import glob
import hashlib
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from weft.engine.gguf.file import GgufError, part_names, parts
from weft.server.library.download import LibraryError, Remote, Report, download, held, http_client
from weft.server.library.names import OnWeb, is_place, models_folder
from weft.server.text.shield import one_line


def cached(place: str) -> Path | None:
    """The first file of a model that is there with all its parts."""
    with contextlib.suppress(GgufError):
        return models_folder() / place if is_place(place) and parts(models_folder() / place) else None
    return None


def fetch(source: OnWeb, report: Report) -> Path:
    """Download what is missing of a model; its first file.

    Raises:
        LibraryError: It cannot be fetched.
    """
    if not source.url:
        raise LibraryError(f"{source} is not there as a whole; fetch it again by its address")
    file, address = models_folder() / source.place, urlsplit(source.url)
    folder, _, last = address.path.rpartition("/")
    with held(_lock(source.place), source.place):
        remotes = {}
        for name, url_name in zip(part_names(file.name), part_names(last), strict=True):
            remotes[file.with_name(name)] = _look(urlunsplit(address._replace(path=f"{folder}/{url_name}")), name)
        download(dict(reversed(remotes.items())), source.place, report, "XDG_DATA_HOME")
    return file


def remove(place: str) -> None:
    """Remove a model and what is left of tries to fetch it. Raises LibraryError if somebody is fetching it."""
    file = models_folder() / place
    with held(_lock(place), place, waits=False):
        for name in part_names(file.name):
            for each in (file.with_name(name), *file.parent.glob(f"{glob.escape(name)}.*.incomplete")):
                each.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it is not empty
        for folder in file.parents[: len(Path(place).parts) - 1]:
            folder.rmdir()


def _lock(place: str) -> Path:
    return models_folder() / ".locks" / hashlib.sha256(place.encode()).hexdigest()[:16]


def _look(url: str, name: str) -> Remote:
    """Ask a server how long a file is, by asking for its first byte: not all answer a HEAD."""
    import httpx

    try:
        headers = {"Range": "bytes=0-0", "Accept-Encoding": "identity"}
        with http_client() as client, client.stream("GET", url, headers=headers) as answer:
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
