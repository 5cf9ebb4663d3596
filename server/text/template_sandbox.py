"""Jinja's sandbox as `transformers` sets it up.

It keeps a template from what is not the conversation. What a template takes is bounded by the process that renders it
(see `template_child`), and by nothing here.
"""

import functools
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

LIST_CHANGES = frozenset({"append", "extend", "insert", "pop"})


class _Environment(ImmutableSandboxedEnvironment):
    @override
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Lists may be changed: a template gets copies where it does that."""
        return (isinstance(obj, list) and attr in LIST_CHANGES) or super().is_safe_attribute(obj, attr, value)


class _GenerationTag(Extension):
    """Renders the body of `{% generation %}`, which marks the text of the model for training."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Scope:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the escapes for HTML of Jinja's own filter, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_items
    )


def _items(value: object) -> list[object]:
    """What filters such as `map` yield, which are no lists."""
    if not isinstance(value, Iterator):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return list(value)


@functools.cache
def _environment() -> _Environment:
    """The sandbox that all templates run in, with what `transformers` gives them."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


class TemplateSourceError(Exception):
    """A source is no template; the message follows the words that it is invalid."""


class Compiled(NamedTuple):
    """A template, the words by which it looks up keys and compares values, and the names that it does not define."""

    template: jinja2.Template
    words: frozenset[str]
    undeclared: frozenset[str]


def compiled(source: str) -> Compiled:
    """Compile a template.

    Raises:
        TemplateSourceError: It is not valid.
    """
    try:
        tree = _environment().parse(source)
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        undeclared = frozenset(meta.find_undeclared_variables(tree))
        return Compiled(_environment().from_string(tree), frozenset(attributes | constants), undeclared)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateSourceError(f" at line {error.lineno}: {error.message}") from error
    except MemoryError as error:  # Python says so of both
        raise TemplateSourceError(": it takes too much memory, or nests too deeply") from error
    except Exception as error:  # what the compiler or Python say of code that nests too deeply, for example
        raise TemplateSourceError(f": {type(error).__name__}: {error}") from error
