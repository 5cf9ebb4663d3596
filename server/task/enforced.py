"""Decides what a grammar enforces of the schemas of tools and answers, and says what it leaves out.

A strict schema is enforced whole or refused. Of any other, what a grammar cannot follow is left out: reported in a
response header as an ignored parameter, and once in the log. Templates show the schemas as they were declared.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice

import msgspec

from weft.server.errors import JsonSchemaError, shown
from weft.server.formats.parser import Tool
from weft.server.json_schema.keywords import Schema
from weft.server.json_schema.loosen import loosened, loosened_arguments
from weft.server.json_schema.shrink import MAX_SCHEMA_BYTES, fitted
from weft.server.text.shield import one_line

_log = logging.getLogger(__name__)
MAX_LOST = 64
"""Most paths that are reported of one tool."""
_MAX_CACHED_BYTES = 1 << 19


def enforceable(declared: Sequence[Tool]) -> tuple[list[Tool], list[str]]:
    """The tools with schemas that a grammar can follow and has room for, and the paths of what that leaves out."""
    texts = [msgspec.json.encode(tool.parameters) for tool in declared]
    if sum(map(len, texts)) > _MAX_CACHED_BYTES:
        return _enforceable(declared)
    names = [(tool.name, tool.is_strict, tool.at) for tool in declared]
    tools, lost = _enforceable_texts(tuple(zip(names, texts, strict=True)))
    return list(tools), list(lost)


@lru_cache(maxsize=64)  # an agent sends the same tools with every turn
def _enforceable_texts(texts: tuple[tuple[tuple[str, bool, str], bytes], ...]) -> tuple[list[Tool], list[str]]:
    return _enforceable([Tool(n, msgspec.json.decode(text), strict, at) for (n, strict, at), text in texts])


def _enforceable(declared: Sequence[Tool]) -> tuple[list[Tool], list[str]]:
    loose, lost = [], []
    for tool in declared:
        if tool.is_strict:
            tool = replace(tool, parameters=exact(tool.parameters, tool.at, tool.name, is_object=True))
        else:
            made = loosened_arguments(tool.parameters)
            lost += reported(tool.name, tool.at, made.lost)
            tool = replace(tool, parameters=made.schema)
        loose.append(tool)
    tools, unfit = fitted_tools(loose)
    return tools, lost + unfit


def fitted_tools(tools: Sequence[Tool], most: int = MAX_SCHEMA_BYTES) -> tuple[list[Tool], list[str]]:
    """The tools with schemas of at most so many bytes, as far as they are not strict, and the paths of what is lost."""
    schemas = fitted([tool.parameters for tool in tools], [not tool.is_strict for tool in tools], most)
    made, lost = list(tools), list[str]()
    for i, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        if schema is not tool.parameters:
            lost += reported(tool.name, tool.at, [freed(schema)])
            made[i] = replace(tool, parameters=schema)
    return made, lost


def exact(schema: Schema, at: str, name: str = "", *, is_object: bool = False) -> Schema:
    """A strict schema in the words that a grammar knows.

    Args:
        at: Path of the schema in the body.
        name: Of the tool; "": it is that of an answer.
        is_object: It allows objects only, as the arguments of a tool.

    Raises:
        JsonSchemaError: A part of it cannot be enforced, or means nothing; the error names it.
    """
    made = (loosened_arguments if is_object else loosened)(schema, is_exact=True)
    of_tool = f" (tool {shown(name)})" if name else ""
    if made.lost:
        why = ": its branches may have values in common" if made.lost[0].endswith(".oneOf") else ""
        fault = made.wrong[0] if made.wrong else f"{made.lost[0]} cannot be enforced by a grammar{why}"
        raise JsonSchemaError(f"{at}{fault}{of_tool}", param=at)
    return made.schema


def freed(schema: Schema) -> str:
    """Path of what a step of `looser` that led to this schema has freed."""
    return ".properties" if "properties" in schema else ""


def reported(name: str, at: str, lost: Iterable[str]) -> list[str]:
    """Log what is not enforced of a schema; return it as paths in the body.

    Args:
        name: Of the tool.
        at: Path of the schema in the body.
        lost: Paths in the schema.
    """
    paths = [f"{at}{path}" for path in islice(lost, MAX_LOST)]
    for path in paths:
        _log_once(one_line(name, 64), one_line(path, 256))
    return paths


@lru_cache(maxsize=4096)  # an agent sends the same tools with every turn
def _log_once(name: str, path: str) -> None:
    _log.warning("The schema of %s is followed in part: a grammar cannot enforce %s", name, path)
