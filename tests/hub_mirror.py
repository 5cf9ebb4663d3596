"""A server that speaks the hub's protocol: lists of files, redirections to where they lie, ranges, ETags, faults."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE = 20_000
"""Bytes from which a file is kept apart, as in git-lfs; smaller ones are served at once."""


@dataclass
class Mirror:
    """What is served, and what goes wrong with it.

    Attributes:
        repositories: Files by name, by repository.
        broken: For each file the shares of it at which the next connections break.
        damaged: Files of which a byte is changed on the way.
        pause_s: Between two tenths of a file.
        gated: Repositories that want the token `secret`.
        asked: Method, path and range of each request.
    """

    port: int = 0
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    broken: dict[str, list[float]] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    pause_s: float = 0.0
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, repository: str, folder: Path) -> dict[str, bytes]:
        """Serve the files of a folder."""
        files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        self.repositories[repository] = files
        return files

    def environment(self, home: Path) -> dict[str, str]:
        """For processes that shall use it, and keep what they fetch under a folder."""
        folders = {"HF_HOME": str(home / "hf"), "XDG_DATA_HOME": str(home / "data")}
        return {**folders, "HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "HF_TOKEN": ""}

    def contents(self) -> list[tuple[str, str]]:
        """Names and ranges of the files that were asked for."""
        return [(path.rpartition("/")[2], span) for method, path, span in self.asked if "/cdn/" in path]

    def revision(self, repository: str) -> str:
        names = sorted(self.repositories[repository])
        return hashlib.sha1(b"".join(self.repositories[repository][name] for name in names)).hexdigest()


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def hub_mirror() -> Iterator[Mirror]:
    """A mirror on a free port until the end of the context."""
    mirror = Mirror()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content_Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            step = len(body) // 10 + 1 if mirror.pause_s and len(body) >= LARGE else max(len(body), 1)
            for start in range(0, len(body) if self.command != "HEAD" else 0, step):
                self.wfile.write(body[start : start + step])
                time.sleep(mirror.pause_s)

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            mirror.asked.append((self.command, path, self.headers.get("Range", "")))
            of_api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path)
            of_file = re.fullmatch(r"/(?:(cdn)/)?([^/]+/[^/]+)/(?:resolve/[^/]+/)?(.+)", path)
            if of_api:
                self.describe(of_api[1], of_api[2] or "")
            elif of_file and of_file[3] in mirror.repositories.get(of_file[2], {}):
                self.file(of_file[2], of_file[3], is_direct=bool(of_file[1]))
            else:
                self.answer(404)

        do_HEAD = do_GET

        def describe(self, repository: str, rest: str) -> None:
            files = mirror.repositories.get(repository)
            if files is None:
                self.answer(404, X_Error_Code="RepoNotFound")
                return
            described = []
            for name, data in files.items():
                entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": _git(data)}
                if len(data) >= LARGE:
                    entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
                described.append(entry)
            if rest.startswith("/tree/"):
                tree = [
                    {"type": "file", "path": e["rfilename"], "size": e["size"], "oid": e["blobId"]}
                    | ({"lfs": {**e["lfs"], "oid": e["lfs"]["sha256"]}} if isinstance(e.get("lfs"), dict) else {})  # type: ignore[dict-item,index]
                    for e in described
                ]
                self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
                return
            info = {"id": repository, "_id": "1", "sha": mirror.revision(repository), "siblings": described}
            self.answer(200, json.dumps(info).encode(), Content_Type="application/json")

        def file(self, repository: str, name: str, *, is_direct: bool) -> None:
            data = mirror.repositories[repository][name]
            is_large = len(data) >= LARGE
            etag = f'"{hashlib.sha256(data).hexdigest() if is_large else _git(data)}"'
            commit = {"X_Repo_Commit": mirror.revision(repository), "ETag": etag}
            if repository in mirror.gated and not is_direct and self.headers.get("Authorization") != "Bearer secret":
                self.answer(401, X_Error_Code="GatedRepo")
            elif is_large and not is_direct:
                linked = {"X_Linked_Etag": etag, "X_Linked_Size": str(len(data))}
                self.answer(302, Location=f"{mirror.url}/cdn/{repository}/{name}", **commit, **linked)
            else:
                self.content(name, data, commit)

        def content(self, name: str, data: bytes, headers: dict[str, str]) -> None:
            if name in mirror.damaged:
                data = data[:-1] + bytes([data[-1] ^ 1])
            span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if_range = self.headers.get("If-Range", headers["ETag"])
            status, start, end = 200, 0, len(data)
            if span and if_range == headers["ETag"]:
                status, start, end = 206, int(span[1]), min(int(span[2] or len(data) - 1) + 1, len(data))
                headers = {**headers, "Content_Range": f"bytes {start}-{end - 1}/{len(data)}"}
            shares = mirror.broken.get(name)
            if not shares or self.command == "HEAD" or end - start < 2:
                self.answer(status, data[start:end], **headers)
                return
            self.send_response(status)
            for key, value in {**headers, "Content_Length": str(end - start)}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(data[start : max(start, int(len(data) * shares.pop(0)))])
            self.close_connection = True

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client has left."""

    with Server(("127.0.0.1", 0), Handler) as server:
        mirror.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield mirror
        finally:
            server.shutdown()
            thread.join()
