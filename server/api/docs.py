"""GET /docs: one page with every route and its fields, generated from the OpenAPI description.

The page has no script and loads nothing from other hosts, so it works offline. Its content security policy forbids the
browser to load anything.
"""

from collections.abc import Iterator
from html import escape
from typing import Any, TypeAlias

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse

_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
code { font-size: .9em }
table { border-collapse: collapse }
th, td { padding: .2rem 1.5rem .2rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #8884 }
"""
_Schema: TypeAlias = dict[str, Any]

router = APIRouter()


@router.get("/docs", include_in_schema=False)
async def show_docs(request: Request) -> HTMLResponse:
    """Every route and its fields, as HTML."""
    return HTMLResponse(render_docs(request.app.openapi()), headers=_HEADERS)


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
