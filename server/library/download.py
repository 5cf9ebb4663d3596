"""Downloads files over HTTP in ranges: goes on where an earlier try ended, and checks each before it gets its name.

What has arrived lies beside the file under a name of its own, which no reader takes for the file. How long the file is
must be known before. A connection that breaks is opened again as long as something arrives. Imports no HTTP client
before there is something to fetch. A lock on each model is heeded by the processes of all servers that share a folder.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from weft.engine.wire.machine import format_size
from weft.server.settings import StartError
from weft.server.text.shield import one_line

logger = logging.getLogger(__name__)

_SILENCE_S = 30.0
"""Seconds without a byte after which a connection counts as broken."""
_CONNECT_S = 10.0
_MAX_FAILURES = 5
"""In a row, without a byte between them."""
_PAUSE_S = 0.5
_RANGE_BYTES = 4 << 30
"""Asked for at once: an address that the hub hands out expires, and some servers send no more than 50 GB."""
_ENDING = ".weft.incomplete"
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_DENIED = {
    401: "permission is needed: set HF_TOKEN",
    403: "permission is denied: accept the model's terms on the hub, and set HF_TOKEN",
    404: "it is not there",
}


class LibraryError(StartError):
    """A model is not there, or cannot be fetched or removed; one line, without the setting that named it."""


class NotHereError(LibraryError):
    """A model that is to be removed is not there."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A file to fetch.

    Attributes:
        name: What it is called for people.
        size: In bytes.
        digest: sha256: and its hash in hex, or git: and the hash that git gives to it; or etag: and what its server
            calls this content, which tells tries for different contents apart and cannot be checked.
    """

    name: str
    url: str
    size: int
    digest: str
    headers: Mapping[str, str] = field(default_factory=dict)


Report = Callable[[Remote, int], None]
"""Called with the number of bytes that are there. What it raises ends the download, which can go on later."""


@contextlib.contextmanager
def held(lock_file: Path, name: str, *, waits: bool = True) -> Iterator[None]:
    """Hold the lock of a model; the kernel gives it back when a process ends, however it does.

    Raises:
        LibraryError: Another process holds it and this one does not wait, or the library cannot be written.
    """
    try:
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        with lock_file.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waits:
                    raise LibraryError(f"{name} is being fetched by another process") from None
                logger.warning("Another process is fetching %s; waiting for it", name)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise LibraryError(f"{name}: the library cannot be written: {error}") from None


def download(remotes: Mapping[Path, Remote], name: str, report: Report, remedy: str = "HF_HOME") -> None:
    """Fetch files of a model that are not there, in this order, if there is room for all. The caller has its lock.

    Args:
        remotes: By where they shall lie, on one disk.
        remedy: The variable that names another place.

    Raises:
        LibraryError: One cannot be fetched or written, or is not what it should be.
    """
    missing = {file: (remote, _partial(remote, file)) for file, remote in remotes.items() if not file.exists()}
    num_bytes = sum(remote.size - (part.stat().st_size if part.exists() else 0) for remote, part in missing.values())
    there = next((each for file in missing for each in file.parents if each.exists()), Path())
    if num_bytes > (free := shutil.disk_usage(there).free):
        told = f"{name} needs {format_size(num_bytes)} on the disk, and {there} has {format_size(free)} free"
        raise LibraryError(f"{told}: make room, or name another place with {remedy}")
    for file, (remote, part) in missing.items():
        _download(remote, file, part, report)


class Client(Protocol):
    """An `httpx.Client`, as far as it is needed; to import it takes 5 MB."""

    def stream(self, method: str, url: str, *, headers: Mapping[str, str]) -> AbstractContextManager[Any]:
        """Send a request."""


def http_client() -> AbstractContextManager[Client]:
    """What fetches: it follows redirections, and gives up on servers that are silent."""
    import httpx

    return httpx.Client(timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S), follow_redirects=True)


def _download(remote: Remote, file: Path, partial: Path, report: Report) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("ab") as out, http_client() as client:
            report(remote, out.tell())
            _fetch(client, remote, out, report)
            os.fsync(out.fileno())
        if not _is_right(partial, remote):
            partial.unlink()
            raise LibraryError(f"{remote.name} is damaged: its checksum is not the one that was told; fetch it again")
        partial.replace(file)
    except OSError as error:
        kept = "what has arrived is kept, and the next try goes on from there"
        raise LibraryError(f"{remote.name} cannot be written ({error.strerror or error}); {kept}") from None


def _partial(remote: Remote, file: Path) -> Path:
    state = hashlib.sha256(f"{remote.digest} {remote.size}".encode()).hexdigest()[:12]
    return file.with_name(f"{file.name[:200]}.{state}{_ENDING}")


def _fetch(client: Client, remote: Remote, out: BinaryIO, report: Report) -> None:
    """Append what is missing, by as many requests as it takes."""
    import httpx

    num_failures = 0
    while (start := out.tell()) < remote.size:
        try:
            _append(client, remote, out, report)
            fault = "the connection ended" if out.tell() == start else ""
        except httpx.TransportError as error:
            fault = one_line(str(error)) or type(error).__name__
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            fault = f"the server answers {status}"
            if status not in _TRY_AGAIN:
                raise LibraryError(f"{remote.name} cannot be fetched: {_DENIED.get(status, fault)}") from None
        except httpx.HTTPError as error:  # too many redirects
            raise LibraryError(f"{remote.name} cannot be fetched: {one_line(str(error))}") from None
        num_failures = 0 if out.tell() > start else num_failures + 1
        if num_failures >= _MAX_FAILURES:
            advice = f"{out.tell():,} of {remote.size:,} bytes are kept, and the next try goes on from there"
            raise LibraryError(f"{remote.name} cannot be fetched: {fault}; {advice}")
        if fault:
            time.sleep(_PAUSE_S * (num_failures + 1))


def _append(client: Client, remote: Remote, out: BinaryIO, report: Report) -> None:
    """Append what one request brings."""
    start = out.tell()
    wanted = {"Range": f"bytes={start}-{min(start + _RANGE_BYTES, remote.size) - 1}", "Accept-Encoding": "identity"}
    with client.stream("GET", remote.url, headers={**remote.headers, **wanted}) as response:
        response.raise_for_status()
        begins = response.headers.get("content-range", "").removeprefix("bytes ").partition("-")[0]
        if response.status_code != 206:  # the whole file
            out.seek(0)
            out.truncate()
        elif begins != str(start):
            raise LibraryError(f"{remote.name} cannot be fetched: another part comes than was asked for")
        for piece in response.iter_raw():
            out.write(piece)
            report(remote, out.tell())
            if out.tell() > remote.size:
                out.truncate(0)
                raise LibraryError(f"{remote.name} is longer than its server said")


def _is_right(file: Path, remote: Remote) -> bool:
    kind, _, digest = remote.digest.partition(":")
    if kind == "etag":
        return True
    head = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % remote.size, usedforsecurity=False)
    with file.open("rb") as data:
        return hashlib.file_digest(data, lambda: head).hexdigest() == digest
