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

from weft.server.formats.parser import Tool
from weft.server.json_schema.keywords import Schema
from weft.server.json_schema.loosen import Loosened, loosened_arguments
from weft.server.json_schema.shrink import fitted
from weft.server.text.shield import one_line

_log = logging.getLogger(__name__)
MAX_LOST = 64
"""Most paths that are reported of one tool."""
_MAX_CACHED_BYTES = 8192


def enforceable(tools: Sequence[Tool]) -> tuple[list[Tool], list[str]]:
    """The tools with schemas that a grammar can follow and has room for, and the paths of what that leaves out."""
    loose, lost = [], []
    for tool in tools:
        if not tool.is_strict:
            made = _loosened(tool.parameters)
            lost += reported(tool.name, tool.at, made.lost)
            tool = replace(tool, parameters=made.schema)
        loose.append(tool)
    schemas = fitted([tool.parameters for tool in loose], [not tool.is_strict for tool in loose])
    for i, (tool, schema) in enumerate(zip(loose, schemas, strict=True)):
        if schema is not tool.parameters:
            lost += reported(tool.name, tool.at, [freed(schema)])
            loose[i] = replace(tool, parameters=schema)
    return loose, lost


def _loosened(parameters: Schema) -> Loosened:
    text = msgspec.json.encode(parameters)
    return _loosened_text(text) if len(text) <= _MAX_CACHED_BYTES else loosened_arguments(parameters)


@lru_cache(maxsize=1024)  # an agent sends the same tools with every turn
def _loosened_text(text: bytes) -> Loosened:
    return loosened_arguments(msgspec.json.decode(text))


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
