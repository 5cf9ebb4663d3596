"""Compiles grammar texts into matchers, in threads beside the step loop, and loads the vocabulary for them.

Owns the vocabulary, the threads and a cache of matchers and faults. A text is compiled once, however many requests
bring it at the same time. Its first mask is computed along with it, so that no step pays for that. The library is
imported when the vocabulary is loaded: most engines see no grammar.

The vocabulary is the bytes of every token id. This is the only place where the engine knows text.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from weft.engine.guidance.matcher import Forcing, GrammarMatcher, one_line
from weft.engine.guidance.meeting import check_meeting
from weft.engine.wire.messages import MAX_GRAMMAR_BYTES
from weft.engine.wire.tokenizer_files import TokenizerFilesError, special_tokens, tokenizer_folder

_MAX_CACHED = 64
_MAX_CACHED_CHARS = 1 << 20
"""Total length of the texts in the cache. A matcher takes up to a few hundred times the memory of its text."""

_NUM_THREADS = 4
"""So many grammars at once, for one that takes long must not keep the others waiting. The library works unlocked."""
_STACK_BYTES = 256 << 20
"""Stack of a compiling thread; only address space until it is used. The library follows chains of rules recursively.
About 5,000 rules overflow the usual 8 MiB, which ends the process."""


class InvalidGrammarError(Exception):
    """A grammar that cannot be used; the message is one line that is fit for the caller."""


class GrammarCompiler:
    """Compiles grammars; only one thread may call `compile`."""

    def __init__(self, load_vocabulary: Callable[[], Forcing]) -> None:
        """Load nothing yet; load_vocabulary is called once, by a compiling thread or by `prepare`."""
        self._load_vocabulary = load_vocabulary
        self._forcing: Forcing | InvalidGrammarError | None = None  # None: not loaded yet
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "grammar")
        self._cache: OrderedDict[str, Future[GrammarMatcher]] = OrderedDict()

    def compile(self, text: str) -> "Future[GrammarMatcher]":
        """Compile a grammar, or find it in the cache. Each output needs a copy of the matcher.

        Returns:
            The matcher at the start of an output, or an InvalidGrammarError.

        Raises:
            InvalidGrammarError: The text is too long.
        """
        num_bytes = len(text.encode())
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidGrammarError(f"a grammar may have at most {MAX_GRAMMAR_BYTES} bytes, got {num_bytes}")
        future = self._cache.pop(text, None)
        if future is None or future.cancelled():
            future = self._submit(text)
        self._cache[text] = future
        while len(self._cache) > _MAX_CACHED or sum(map(len, self._cache)) > _MAX_CACHED_CHARS:
            self._cache.popitem(last=False)
        return future

    def prepare(self) -> Forcing:
        """Load the vocabulary. Holds the interpreter lock: about a second for 150,000 entries.

        Raises:
            InvalidGrammarError: The checkpoint has no usable vocabulary.
        """
        with self._lock:
            if self._forcing is None:
                try:
                    self._forcing = self._load_vocabulary()
                except InvalidGrammarError as error:  # the files stay as they are
                    self._forcing = error
            if isinstance(self._forcing, InvalidGrammarError):
                raise InvalidGrammarError(str(self._forcing))
            return self._forcing

    def _submit(self, text: str) -> "Future[GrammarMatcher]":
        before = threading.stack_size(_STACK_BYTES)  # the pool starts its threads in submit
        try:
            return self._pool.submit(self._compile, text)
        finally:
            threading.stack_size(before)

    def _compile(self, text: str) -> GrammarMatcher:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        forcing = self.prepare()
        assert isinstance(forcing.vocabulary, LLTokenizer)
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(forcing.vocabulary, _without_forcing(text), log_level=0, limits=limits)
        _check(matcher.get_error())
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        _check(matcher.get_error())
        # Drafts need a matcher that can roll back. The library reports only here that some grammars cannot.
        probe = matcher.deep_copy()
        probe.consume_token(int(bits.argmax()))
        probe.rollback(1)
        _check(probe.get_error())
        return GrammarMatcher(matcher, forcing)


def _check(fault: str) -> None:
    if fault:
        raise InvalidGrammarError(f"the grammar cannot be used: {one_line(fault)}")


def _without_forcing(text: str) -> str:
    """Wrap the grammar in one that turns off the library's own search for forced text.

    That search has no bound, and computing a mask includes it: a short schema took half a minute and gigabytes with the
    interpreter lock held. An option line in the caller's Lark text would not do, because a later line can undo it.
    """
    try:
        is_list = text.lstrip().startswith("{")
        document: dict[str, list[dict[str, object]]] = (
            json.loads(text) if is_list else {"grammars": [{"lark_grammar": text}]}
        )
        grammars = [_without_gbnf(grammar) for grammar in document["grammars"]]
        for grammar in grammars:
            check_meeting(grammar)
        grammars[0]["name"] = name = grammars[0].get("name") or "output"
    except Exception as error:  # the text is a caller's, and the translator may raise anything
        raise InvalidGrammarError(f"the grammar cannot be used: {one_line(str(error))}") from error
    options = '%llguidance {"no_forcing": true}'
    return json.dumps({**document, "grammars": [{"lark_grammar": f"{options}\nstart: @{name}"}, *grammars]})


def _without_gbnf(grammar: dict[str, object]) -> dict[str, object]:
    """Translate an entry {"gbnf": ...}, which the library does not know, into Lark."""
    if "gbnf" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    lark = gbnf_to_lark(str(grammar["gbnf"]))
    return {key: value for key, value in grammar.items() if key != "gbnf"} | {"lark_grammar": lark}


class _AddedToken(msgspec.Struct):
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def load_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Forcing:
    """Read tokenizer.json, and which tokens the files beside it declare special.

    Special tokens are the same as in the server's tokenizer, so a grammar never matches one by its text. Reading
    150,000 entries takes about 1.5 s and holds the interpreter lock. So it happens when the engine is idle or at the
    first grammar, not at start.

    Args:
        vocab_size: Rows of the model's logits; ids without text are never allowed.
        eos_token_ids: Allowed where a grammar accepts.

    Raises:
        InvalidGrammarError: There is no tokenizer, or it cannot be used.
    """
    from llguidance import LLTokenizer

    try:
        file = tokenizer_folder(folder) / "tokenizer.json"
    except TokenizerFilesError as error:
        raise InvalidGrammarError(f"a grammar needs a tokenizer: {error}") from error
    try:
        text = _declare_special(file.read_text(encoding="utf-8"), _declared(folder))
        return Forcing(LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None))
    except Exception as error:  # the libraries raise nothing more precise
        raise InvalidGrammarError(f"grammars cannot use the tokenizer.json of this checkpoint: {error}") from error


def _declared(folder: Path) -> list[str]:
    """Texts of the tokens that special_tokens_map.json and tokenizer_config.json declare special."""
    declared: dict[str, object] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            declared |= msgspec.json.decode((folder / name).read_bytes(), type=dict[str, object])
    named, others = special_tokens(declared)
    return [*named.values(), *others]


def _declare_special(text: str, declared: list[str]) -> str:
    """The tokenizer.json with these tokens marked special. Never grows the vocabulary."""
    added = {token.content for token in msgspec.json.decode(text, type=_TokenizerFile).added_tokens}
    missing = [content for content in dict.fromkeys(declared) if content not in added]
    if not missing:
        return text
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(text)
    backend.add_special_tokens([content for content in missing if backend.token_to_id(content) is not None])
    declared_text: str = backend.to_str()
    return declared_text
