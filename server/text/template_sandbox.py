"""Jinja's sandbox as `transformers` sets it up, and limits of what a chat template may take: time, memory and text.

A template is foreign code that runs in the server's process. Time is looked at in every round of a loop and at every
call, for without these a template soon ends. What one operation takes is bounded by memory, as a limit of the process
that holds while a template is compiled or rendered; only numbers could grow for long without much of it, so products
and powers are bounded by themselves. All this costs microseconds.
"""

import contextlib
import functools
import json
import os
import resource
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

MAX_SECONDS = 10.0
"""Of one rendering. Conversations of the largest body take a tenth."""
PROBE_SECONDS = 1.0
"""Of a rendering of two short messages."""
MAX_BYTES = 1 << 30
"""By which the process may grow meanwhile."""
MAX_CHARS = 1 << 27
"""Of what is rendered: four times the largest body."""
MAX_SOURCE_CHARS = 1 << 20
_MAX_BITS = 4096
"""Of a product or power of integers."""
LIST_CHANGES = frozenset({"append", "extend", "insert", "pop"})
_PAGE_BYTES = resource.getpagesize()


class TemplateLimitError(Exception):
    """A template takes too much; the message says of what."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits; what `compiled` makes is rendered within `limits`."""

    intercepted_binops = frozenset({"*", "**"})

    @property
    def tick(self) -> None:
        """What loops evaluate in every round. Raises TemplateLimitError when the time is over."""
        limit: _Time | None = getattr(_thread, "limit", None)
        if limit is not None and time.monotonic() > limit.end and time.thread_time() > limit.cpu_end:
            raise TemplateLimitError(f"it takes more than {limit.seconds:g} s")

    @override
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Lists may be changed: a template gets copies where it does that."""
        return (isinstance(obj, list) and attr in LIST_CHANGES) or super().is_safe_attribute(obj, attr, value)

    @override
    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick  # noqa: B018 (which raises)
        return super().call(context, obj, *args, **kwargs)

    @override
    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            sizes = left.bit_length(), right.bit_length()
            num_bits = sum(sizes) if operator == "*" else sizes[0] * min(abs(right), _MAX_BITS + 1)
            if num_bits > _MAX_BITS:
                raise TemplateLimitError(f"its numbers have more than {_MAX_BITS} bits")
        return super().call_binop(context, operator, left, right)

    @override
    def concat(self, pieces: Iterable[str]) -> str:
        """Join the output of a template or macro."""
        text = "".join(pieces)
        if len(text) > MAX_CHARS:
            raise TemplateLimitError(f"it writes more than {MAX_CHARS} characters")
        return text


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
def environment() -> LimitedEnvironment:
    """The sandbox that all templates run in, with what `transformers` gives them."""
    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
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
    """Compile a template, every loop of which looks at the time.

    Raises:
        TemplateSourceError: It is not valid, or takes too much.
    """
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateSourceError(f": it must have at most {MAX_SOURCE_CHARS} characters, has {len(source)}")
    try:
        with limits():
            tree = environment().parse(source)
            attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
            constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
            undeclared = frozenset(meta.find_undeclared_variables(tree))
            for loop in tree.find_all(nodes.For):
                tick = nodes.EnvironmentAttribute("tick", lineno=loop.lineno, environment=tree.environment)
                loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno, environment=tree.environment))
            return Compiled(environment().from_string(tree), frozenset(attributes | constants), undeclared)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateSourceError(f" at line {error.lineno}: {error.message}") from error
    except Exception as error:  # what the compiler or Python say of code that nests too deeply, for example
        raise TemplateSourceError(f": {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def limits(seconds: float | None = None) -> Iterator[None]:
    """Bound the time and memory of what a template does in this thread.

    Args:
        seconds: None for MAX_SECONDS.

    Raises:
        TemplateLimitError: It took more.
    """
    before = getattr(_thread, "limit", None)
    seconds = MAX_SECONDS if seconds is None else seconds
    _thread.limit = _Time(seconds, time.monotonic() + seconds, time.thread_time() + seconds)
    try:
        with _memory:
            yield
    except MemoryError:
        raise TemplateLimitError(f"it takes more than {MAX_BYTES >> 20} MiB of memory") from None
    finally:
        _thread.limit = before


class _Time(NamedTuple):
    """When the time of a thread is over: that of its own work, which is asked for only after so much of any time."""

    seconds: float
    end: float
    cpu_end: float


class _Memory:
    """Lowers the limit of the process's data while any thread is inside: other limits know nothing of single threads.

    What the others allocate meanwhile counts, too, and is far less.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._before = 0, 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._before = resource.getrlimit(resource.RLIMIT_DATA)
            self._num_inside += 1
            if (used := _data_bytes()) is not None:
                self._set(used + MAX_BYTES)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                self._set(None)

    def _set(self, num_bytes: int | None) -> None:
        soft, hard = self._before
        if num_bytes is not None and (soft == resource.RLIM_INFINITY or num_bytes < soft):
            soft = num_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int | None:
    """What counts for the limit now; None where it is unknown, and nothing is limited."""
    try:
        return int(os.pread(_statm(os.getpid()), 256, 0).split()[5]) * _PAGE_BYTES
    except (OSError, LookupError, ValueError):
        return None


@functools.cache
def _statm(process: int) -> int:
    return os.open(f"/proc/{process}/statm", os.O_RDONLY)


_thread = threading.local()
_memory = _Memory()
