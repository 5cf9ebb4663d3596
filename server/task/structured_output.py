"""Reads the structured output that a body asks for, in any of its fields, and what of its schemas a grammar enforces.

A grammar is one entry of `llguidance`'s list of grammars: {"json_schema": ...} or {"lark_grammar": ...}.

A strict schema is enforced whole or refused. Of any other, what a grammar cannot follow is left out: reported in a
response header as an ignored parameter, and once in the log. Templates show the schemas as they were declared.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import msgspec
from pydantic import ValidationError

from weft.server.errors import GrammarError, InvalidRequestError, JsonSchemaError, shown
from weft.server.formats import grammar as lark
from weft.server.formats.grammar import guided_schema
from weft.server.formats.parser import Tool
from weft.server.json_schema.keywords import Schema
from weft.server.json_schema.loosen import loosened, loosened_arguments
from weft.server.json_schema.patterns import countable
from weft.server.json_schema.shrink import MAX_SCHEMA_BYTES, fitted
from weft.server.task.schema import GuidedBody, ResponseFormat, StructuralTag, StructuredOutputs, TaggedStructure
from weft.server.task.validation import required
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


MAX_CHOICES = 4096
_LARK_START = re.compile(
    r"^[ \t]*\??start[ \t]*:", re.MULTILINE
)  # within one line: \s would scan the same line breaks again and again


@dataclass(frozen=True, slots=True)
class Structure:
    """The grammar that the text of an answer must follow.

    Attributes:
        param: The field that asks for it.
        schema: The schema that the grammar enforces; None: it is no JSON schema.
        is_strict: The schema is enforced whole or refused.
        lost: Paths of what the schema asks for and the grammar does not enforce.
    """

    grammar: dict[str, Any]
    param: str
    schema: dict[str, Any] | None = None
    is_strict: bool = True
    lost: Sequence[str] = ()


def structure_of(body: GuidedBody) -> Structure | None:
    """Read the one structure that a body asks for; None for free text.

    Raises:
        InvalidRequestError: The body asks for several, or one is incomplete.
    """
    structures = list(_structures(body))
    if len(structures) > 1:
        first, second = structures[0].param, structures[1].param
        raise InvalidRequestError(f"{second} cannot be used together with {first}", param=second)
    return structures[0] if structures else None


def _structures(body: GuidedBody) -> Iterator[Structure]:
    if body.response_format is not None and body.response_format.type != "text":
        yield _response_format(body.response_format)
    if body.structured_outputs is not None:
        yield _structured_outputs(body.structured_outputs)
    yield from _fields("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)


def _response_format(wanted: ResponseFormat) -> Structure:
    if wanted.type == "json_object":
        return json_structure({"type": "object"}, "response_format")
    if wanted.type == "structural_tag":
        structures = required(wanted.structures, "response_format.structures")
        return _tags(structures, required(wanted.triggers, "response_format.triggers"), "response_format")
    named = required(wanted.json_schema, "response_format.json_schema")
    schema = {"type": "object"} if named.schema_ is None else named.schema_
    return json_structure(schema, f"response_format{wanted.schema_at}", strict=named.strict)


def _structured_outputs(wanted: StructuredOutputs) -> Structure:
    at = "structured_outputs"
    found = list(_fields(f"{at}.", wanted.json_, wanted.regex, wanted.choice, wanted.grammar))
    if wanted.json_object:
        found.append(json_structure({"type": "object"}, f"{at}.json_object"))
    if wanted.structural_tag is not None:
        found.append(_structural_tag(wanted.structural_tag, f"{at}.structural_tag"))
    if len(found) != 1:
        raise InvalidRequestError(f"{at} must hold exactly one of its members, got {len(found)}", param=at)
    return found[0]


def _fields(
    at: str, json: str | dict[str, Any] | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[Structure]:
    """The structures of the members that two fields share. The path of a member is `at` and its name."""
    if json is not None:
        yield json_structure(_object(json, f"{at}json"), f"{at}json")
    if regex is not None:
        if (expression := countable(regex)) is None:
            message = f"{at}regex: repeats inside repeats are too many to be counted"
            raise GrammarError(message, param=f"{at}regex")
        yield Structure({"lark_grammar": f"start: {lark.regex(expression)}"}, f"{at}regex")
    if choice is not None:
        if not 1 <= len(choice) <= MAX_CHOICES:
            message = f"{at}choice must hold 1 to {MAX_CHOICES} texts, got {len(choice)}"
            raise InvalidRequestError(message, param=f"{at}choice")
        texts = " | ".join(map(lark.literal, choice))  # one terminal: a rule per choice overloads the parser
        yield Structure({"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}, f"{at}choice")
    if grammar is not None:
        is_gbnf = "::=" in grammar and not _LARK_START.search(grammar)
        yield Structure({"gbnf" if is_gbnf else "lark_grammar": grammar}, f"{at}grammar")


def json_structure(schema: dict[str, Any], param: str, *, strict: bool | None = True) -> Structure:
    """The structure of a JSON schema, which stands at `param` in the body.

    Args:
        strict: If not, what a grammar cannot express is left out; if false, what means nothing, too.

    Raises:
        JsonSchemaError: The schema cannot be followed, or is none.
    """
    if strict:
        return schema_structure(exact(schema, param), param, is_strict=True)
    made = loosened(schema)
    if made.wrong and strict is None:
        raise JsonSchemaError(f"{param}{made.wrong[0]}", param=param)
    [schema] = fitted([made.schema], [True])
    lost = [*made.lost, *([] if schema is made.schema else [freed(schema)])]
    return schema_structure(schema, param, is_strict=False, lost=reported("the answer", param, lost))


def schema_structure(schema: dict[str, Any], param: str, *, is_strict: bool, lost: Sequence[str] = ()) -> Structure:
    """The structure of a schema that a grammar can follow."""
    return Structure({"json_schema": guided_schema(schema)}, param, schema, is_strict, lost)


def _structural_tag(given: str | dict[str, Any], param: str) -> Structure:
    try:
        tag = StructuralTag.model_validate(_object(given, param))
    except ValidationError as exc:
        error = exc.errors()[0]
        at = ".".join(map(str, (param, *error["loc"])))
        raise InvalidRequestError(f"{at}: {error['msg'].lower()}", param=at) from None
    return _tags(tag.structures, tag.triggers, param)


def _tags(structures: list[TaggedStructure], triggers: list[str], param: str) -> Structure:
    """Free text in which each trigger starts one of the structures that begin with it."""
    by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers if trigger}
    for i, structure in enumerate(structures):
        trigger = next((trigger for trigger in by_trigger if structure.begin.startswith(trigger)), None)
        if trigger is None:
            at = f"{param}.structures[{i}].begin"
            message = f"{at} must begin with one of the triggers, got {shown(structure.begin)}"
            raise InvalidRequestError(message, param=at)
        value = lark.json_value(exact(structure.schema_, f"{param}.structures[{i}].schema"))
        parts = (lark.literal(structure.begin[len(trigger) :]), value, lark.literal(structure.end))
        by_trigger[trigger].append(" ".join(part for part in parts if part != '""'))
    rules = ["TEXT: /(.|\\n)*/"]
    used = [(trigger, bodies) for trigger, bodies in by_trigger.items() if bodies]
    for i, (trigger, bodies) in enumerate(used):
        rules.append(f"open_{i}[lazy]: TEXT {lark.literal(trigger)}")
        rules.append(f"tag_{i}: open_{i} ({' | '.join(bodies)})")
    tags = " | ".join(f"tag_{i}" for i in range(len(used)))
    start = f"start: ({tags})* tail\ntail: TEXT" if tags else "start: TEXT"
    return Structure({"lark_grammar": "\n".join([start, *rules])}, param)


def _object(given: str | dict[str, Any], param: str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        value = msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{param} must be a JSON object, got {shown(given)}", param=param)
    return value
