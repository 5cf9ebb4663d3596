"""Downloads a file over HTTP in ranges: goes on where an earlier try ended, and checks it before it gets its name.

What has arrived lies beside the file under a name of its own, which no reader takes for the file. How long the file is
must be known before. A connection that breaks is opened again as long as something arrives. Imports no HTTP client
before there is something to fetch.
"""

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from weft.server.settings import StartError
from weft.server.text.shield import one_line

if TYPE_CHECKING:
    import httpx

SILENCE_S = 30.0
"""Seconds without a byte after which a connection counts as broken."""
CONNECT_S = 10.0
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


def num_missing(remote: Remote, file: Path) -> int:
    """The number of bytes that are still to be fetched."""
    partial = _partial(remote, file)
    return 0 if file.exists() else remote.size - (partial.stat().st_size if partial.exists() else 0)


def download(remote: Remote, file: Path, report: Report) -> None:
    """Fetch a file unless it is there. The caller sees to it that nobody else does the same.

    Raises:
        LibraryError: It cannot be fetched or written, or is not what it should be.
    """
    if file.exists():
        return
    import httpx

    partial = _partial(remote, file)
    timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("ab") as out, httpx.Client(timeout=timeout, follow_redirects=True) as client:
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


def _fetch(client: "httpx.Client", remote: Remote, out: BinaryIO, report: Report) -> None:
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
    if out.tell() > remote.size:
        raise LibraryError(f"{remote.name} is longer than its server said")


def _append(client: "httpx.Client", remote: Remote, out: BinaryIO, report: Report) -> None:
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
                return


def _is_right(file: Path, remote: Remote) -> bool:
    kind, _, digest = remote.digest.partition(":")
    if kind == "etag":
        return True
    head = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % remote.size, usedforsecurity=False)
    with file.open("rb") as data:
        return hashlib.file_digest(data, lambda: head).hexdigest() == digest
