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

from engine.grammar.errors import GrammarError
from engine.grammar.matcher import GrammarMatcher, one_line

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
        self._vocabulary: LLTokenizer | None = None
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

    def prepare(self) -> "LLTokenizer":
        """Load the vocabulary, which holds the interpreter lock: a second for 150,000 entries.

        Raises:
            GrammarError: The checkpoint has none.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
            return self._vocabulary

    def _submit(self, text: str) -> "Future[GrammarMatcher]":
        before = threading.stack_size(_STACK_BYTES)  # the pool makes its threads in submit
        try:
            return self._pool.submit(self._compile, text)
        finally:
            threading.stack_size(before)

    def _compile(self, text: str) -> GrammarMatcher:
        vocabulary = self.prepare()
        import llguidance

        text = _without_gbnf(text) if '"gbnf"' in text else text
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
        _check(matcher)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        _check(matcher)
        # Drafts need a matcher that can go back; the library finds out too late that some grammars cannot.
        probe = matcher.deep_copy()
        probe.consume_token(int(bits.argmax()))
        probe.rollback(1)
        _check(probe)
        return GrammarMatcher(matcher)


def _check(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        raise GrammarError(f"the grammar cannot be used: {one_line(matcher.get_error())}")


def _without_gbnf(text: str) -> str:
    """Translate entries {"gbnf": ...} of llguidance's list of grammars, which it does not know, into Lark."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        document = json.loads(text)
        for grammar in document["grammars"]:
            if "gbnf" in grammar:
                grammar["lark_grammar"] = gbnf_to_lark(grammar.pop("gbnf"))
    except Exception as error:  # the translator raises what it likes
        raise GrammarError(f"the grammar cannot be used: {one_line(str(error))}") from error
    return json.dumps(document)
