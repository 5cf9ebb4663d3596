"""Grammar texts -> matchers, beside the step loop.

Owns the vocabulary, the threads and the cache of what was compiled, faults included. A text is compiled once, however
many requests bring it at the same time, and its first mask is computed along with it, so that no step pays for that.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from weft.engine.guidance.errors import GrammarError
from weft.engine.guidance.forcing import Forcing
from weft.engine.guidance.matcher import GrammarMatcher, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_BYTES = 128 << 10
"""Longest text. Time and memory to compile, and to compute a mask, grow with it."""

_MAX_CACHED = 64
_MAX_CACHED_CHARS = 1 << 20
"""Of all texts in the cache; a matcher takes up to some hundred times the memory of its text."""

_NUM_THREADS = 2
_STACK_BYTES = 256 << 20
"""Stack of a compiling thread, address space until it is used: a chain of rules as long as a text can be is followed
recursively, and overflowed the usual 8 MiB at some 5,000 rules, which ends the process."""


class GrammarCompiler:
    """Compiles what it is asked for; `compile` belongs to one thread."""

    def __init__(self, load_vocabulary: Callable[[], "LLTokenizer"]) -> None:
        """Take where the vocabulary comes from; it is called once, in a thread, when the first grammar comes."""
        self._load_vocabulary = load_vocabulary
        self._forcing: Forcing | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "grammar")
        self._cache: OrderedDict[str, Future[GrammarMatcher]] = OrderedDict()

    def compile(self, text: str) -> "Future[GrammarMatcher]":
        """Compile a grammar, or find it; whoever follows it needs a copy of the matcher.

        Returns:
            The matcher at the beginning of an output, or a GrammarError.

        Raises:
            GrammarError: The text is too long.
        """
        num_bytes = len(text.encode())
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"a grammar may have at most {MAX_GRAMMAR_BYTES} bytes, got {num_bytes}")
        future = self._cache.pop(text, None)
        if future is None or future.cancelled():
            future = self._submit(text)
        self._cache[text] = future
        while len(self._cache) > _MAX_CACHED or sum(map(len, self._cache)) > _MAX_CACHED_CHARS:
            self._cache.popitem(last=False)
        return future

    def prepare(self) -> Forcing:
        """Load the vocabulary, which holds the interpreter lock: a second for 150,000 entries.

        Raises:
            GrammarError: The checkpoint has none.
        """
        with self._lock:
            if self._forcing is None:
                self._forcing = Forcing(self._load_vocabulary())
            return self._forcing

    def _submit(self, text: str) -> "Future[GrammarMatcher]":
        before = threading.stack_size(_STACK_BYTES)  # the pool makes its threads in submit
        try:
            return self._pool.submit(self._compile, text)
        finally:
            threading.stack_size(before)

    def _compile(self, text: str) -> GrammarMatcher:
        forcing = self.prepare()
        import llguidance

        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(forcing.vocabulary, _without_forcing(text), log_level=0, limits=limits)
        _check(matcher)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        _check(matcher)
        # Drafts need a matcher that can go back; the library finds out too late that some grammars cannot.
        probe = matcher.deep_copy()
        probe.consume_token(int(bits.argmax()))
        probe.rollback(1)
        _check(probe)
        return GrammarMatcher(matcher, forcing)


def _check(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        raise GrammarError(f"the grammar cannot be used: {one_line(matcher.get_error())}")


def _without_forcing(text: str) -> str:
    """The grammar behind one of ours that turns the library's search for forced text off, whatever the others say.

    That search ends where the forced text does, and masks contain it: a short schema took half a minute and gigabytes,
    with the interpreter lock held. A line of options in Lark text would not do, for a later one undoes it.
    """
    try:
        is_list = text.lstrip().startswith("{")
        document: dict[str, list[dict[str, object]]] = (
            json.loads(text) if is_list else {"grammars": [{"lark_grammar": text}]}
        )
        grammars = [_without_gbnf(grammar) for grammar in document["grammars"]]
        grammars[0]["name"] = name = grammars[0].get("name") or "output"
    except Exception as error:  # the text is a caller's, and the translator raises what it likes
        raise GrammarError(f"the grammar cannot be used: {one_line(str(error))}") from error
    options = '%llguidance {"no_forcing": true}'
    return json.dumps({**document, "grammars": [{"lark_grammar": f"{options}\nstart: @{name}"}, *grammars]})


def _without_gbnf(grammar: dict[str, object]) -> dict[str, object]:
    """Translate an entry {"gbnf": ...}, which the library does not know, into Lark."""
    if "gbnf" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    lark = gbnf_to_lark(str(grammar["gbnf"]))
    return {key: value for key, value in grammar.items() if key != "gbnf"} | {"lark_grammar": lark}
