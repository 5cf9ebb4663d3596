"""GET /: serves the chat page and its files. They need no API key; their requests to the API do.

The content security policy lets the page load these files and talk to this server, and nothing else. The page requires
trusted types and defines none. So the browser refuses every string that a script would turn into HTML.
"""

import hashlib
from importlib.resources import files
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
_HEADERS: Final = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_KINDS: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_FILES: Final = {
    ("/" if file.name == "index.html" else f"/chat_page/{file.name}"): (
        _KINDS[file.name.rpartition(".")[2]],
        file.read_bytes(),
    )
    for file in files("weft.server").joinpath("chat_page").iterdir()
    if file.name.rpartition(".")[2] in _KINDS
}

PATHS: Final = frozenset(_FILES)
"""Paths that a browser loads before a key is entered."""

router = APIRouter()


async def show_file(request: Request) -> Response:
    """Send one file, or 304 if the browser already has this version."""
    kind, content = _FILES[request.scope["path"]]
    headers = {**_HEADERS, "etag": f'"{hashlib.blake2s(content, digest_size=8).hexdigest()}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


for _path in sorted(PATHS):
    router.add_api_route(_path, show_file, methods=["GET", "HEAD"], include_in_schema=False)
