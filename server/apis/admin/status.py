"""Routes that show the server itself: its state for probes and tools, and its pages for people.

/health, /ready and /version are for probes and load balancers; /health and /ready need no API key, /version needs one.
/stats is JSON for the chat page, /metrics is in Prometheus' text format. / is the chat page, which needs no API key,
while its requests to the API do. /docs is one page with every route and its fields, from the OpenAPI description.
"""

import gzip
import hashlib
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Final, TypeAlias

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from weft.engine.wire.status_page import SHOWN, Status
from weft.server.apis.openai.pages import json_answer
from weft.server.errors import EngineRestartingError, ShuttingDownError
from weft.server.formats.reasoning import reasoning_switch
from weft.server.http.context import VERSION, Context, ServerContext


class ThinkingSwitch(msgspec.Struct):
    """The `chat_template_kwargs` that turn reasoning on, and those that turn it off."""

    on: Mapping[str, Any]
    off: Mapping[str, Any]


class Stats(msgspec.Struct):
    """The model's abilities, and the state of the engine.

    Attributes:
        max_model_len: Null while the engine loads.
        has_tools: Whether the chat template shows tools.
        thinking: How to switch reasoning; null: there is no switch.
        input_modalities: As in /v1/models: `image` if it sees; null if it was never loaded.
        mcp_servers: The labels of those that /v1/responses may use.
        engine: One reading of the status page, with the names of `weft.engine.wire.status_page.Status`.
    """

    model: str
    version: str
    is_ready: bool
    max_model_len: int | None
    has_tools: bool
    thinking: ThinkingSwitch | None
    input_modalities: tuple[str, ...] | None
    mcp_servers: list[str]
    engine: Mapping[str, float]


router = APIRouter()

_switch = lru_cache(maxsize=16)(reasoning_switch)


@router.get("/stats")
async def show_stats(request: Request, context: Context, model: str | None = None) -> Response:
    """The abilities of a model, by default the first that chats, and what its engine counted since it started."""
    served = context.find_model(
        request, model or next((name for name, each in context.models.items() if each.may_chat), None)
    )
    await served.engine_client.meet()
    info, status = served.engine_client.info, served.engine_client.status()
    switch = _switch(served.formats.template)
    stats = Stats(
        model=model or served.name,
        version=VERSION,
        is_ready=info is not None and status.is_alive,
        max_model_len=info.max_model_len if info else None,
        has_tools=served.formats.tools is not None,
        thinking=ThinkingSwitch(switch.on, switch.off) if switch else None,
        input_modalities=served.input_modalities,
        mcp_servers=sorted(context.settings.mcp_servers),
        engine=engine_stats(status),
    )
    return json_answer(stats, {"cache-control": "no-store"})


def engine_stats(status: Status) -> dict[str, float]:
    """The part of a reading that is public."""
    return {name: getattr(status, name) for name, shown in SHOWN.items() if shown.in_stats}


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(context: Context) -> Response:
    """200 while the engine shows signs of life, else 503."""
    await _check_engines(context)
    return JSONResponse({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(context: Context) -> Response:
    """200 while new requests are accepted, else 503."""
    if context.lifecycle.draining:
        raise ShuttingDownError("the server is shutting down")
    await _check_engines(context)
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def show_version() -> Response:
    """The version of this server."""
    return JSONResponse({"version": VERSION})


async def _check_engines(context: ServerContext) -> None:
    """Raise unless every engine is alive.

    Its status page in shared memory says so. That a server process answers proves nothing about the engine.
    """
    await context.meet_engines()
    for client in context.engine_clients:
        status = client.status()
        if missing := status.num_missing_machines:
            raise EngineRestartingError(f"the engine waits for {missing} of its machines to join")
        if client.info is None:
            raise EngineRestartingError("no engine is connected: it is loading or restarting")
        if not status.is_alive:
            silence_s = time.monotonic() - status.progress_time
            what = f"has given no sign of life for {silence_s:.0f} s" if status.is_ready else "is loading"
            raise EngineRestartingError(f"the engine {what}")


@router.get("/metrics")
async def show_metrics(context: Context) -> Response:
    """The metrics; every server process gives the same answer."""
    return Response(context.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})


_PAGE_POLICY = {
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
"""Lets the chat page load its own files and talk to this server, and nothing else. The page requires trusted types and
defines none. So the browser refuses every string that a script would turn into HTML."""
_PAGE_HEADERS: Final = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _PAGE_POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_KINDS: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def _files(folder: Traversable, path: str) -> Iterator[tuple[str, tuple[str, bytes, bool]]]:
    """Paths with the kind and the content of their files, and whether that is packed."""
    for file in folder.iterdir():
        name = file.name.removesuffix(".gz")
        if file.is_dir():
            yield from _files(file, f"{path}{name}/")
        elif kind := _KINDS.get(name.rpartition(".")[2]):
            yield "/" if name == "index.html" else f"{path}{name}", (kind, file.read_bytes(), name != file.name)


_FILES: Final = dict(_files(files("weft.server").joinpath("chat_page"), "/chat_page/"))

PATHS: Final = frozenset(_FILES)
"""Paths that a browser loads before a key is entered."""


async def show_file(request: Request) -> Response:
    """Send one file, or 304 if the browser already has this version."""
    kind, content, is_packed = _FILES[request.scope["path"]]
    headers = {**_PAGE_HEADERS, "vary": "accept-encoding"} if is_packed else {**_PAGE_HEADERS}
    if is_packed and "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
    elif is_packed:
        content = gzip.decompress(content)
    headers["etag"] = f'"{hashlib.blake2s(content, digest_size=8).hexdigest()}"'
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


for _path in sorted(PATHS):
    router.add_api_route(_path, show_file, methods=["GET", "HEAD"], include_in_schema=False)


_DOCS_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
"""The page of /docs has no script and loads nothing, so it works offline. The browser is forbidden to load anything."""
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
code { font-size: .9em }
table { border-collapse: collapse }
th, td { padding: .2rem 1.5rem .2rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #8884 }
"""
_Schema: TypeAlias = dict[str, Any]


@router.get("/docs", include_in_schema=False)
async def show_docs(request: Request) -> HTMLResponse:
    """Every route and its fields, as HTML."""
    return HTMLResponse(render_docs(request.app.openapi()), headers=_DOCS_HEADERS)


def render_docs(openapi: _Schema) -> str:
    """Render an OpenAPI 3.1 description as HTML: the routes, then the schemas of their bodies."""
    title = escape(f"{openapi['info']['title']} {openapi['info']['version']}")
    schemas = openapi.get("components", {}).get("schemas", {})
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><body><h1>{title}</h1>',
        '<p>The same for programs: <a href="openapi.json">openapi.json</a>. JSON null means absent.</p>',
        *_routes(openapi["paths"]),
        *(f'<h2 id="{escape(name)}">{escape(name)}</h2>{_object(schema)}' for name, schema in schemas.items()),
        "</body></html>",
    ]
    return "\n".join(parts)


def _routes(paths: _Schema) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            yield f"<h2><code>{escape(f'{method.upper()} {path}')}</code></h2>"
            yield f"<p>{escape(operation.get('description', ''))}</p>"
            for content in operation.get("requestBody", {}).get("content", {}).values():
                yield f"<p>Body: {_type(content['schema'])}</p>"


def _object(schema: _Schema) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code><td>{_type(field)}<td>{'required' if name in required else ''}"
        for name, field in schema.get("properties", {}).items()
    ]
    table = f"<table><tr><th>field<th>value<th>{''.join(rows)}</table>" if rows else _type(schema)
    return f"<p>{escape(schema.get('description', ''))}</p>{table}"


def _type(schema: _Schema) -> str:
    """Describe a schema in words, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    if options := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(_type(option) for option in options if option.get("type") != "null")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return ", ".join(f"<code>{escape(str(value))}</code>" for value in values)
    kind = schema.get("type", "anything")
    return f"list of {_type(schema['items'])}" if kind == "array" and "items" in schema else escape(kind)
