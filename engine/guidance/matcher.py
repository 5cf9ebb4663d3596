"""Follows one output and tells which ids may come next, and which must: by its grammar and its reasoning budget.

A `GrammarMatcher` owns the parser's state, which has consumed exactly the known output ids. It never raises because of
a grammar or an output: `accept` returns a message when an output cannot go on.
"""

import codecs
import copy
import re
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from weft.engine.batch import NO_TOKEN_ID, Bits
from weft.engine.wire.messages import ReasoningBudget

MAX_FORCED_BYTES = 512
"""Longest walk; it takes 30 us a byte. Behind the ids that it found, a new walk begins."""


class _Vocabulary(Protocol):
    """What is used of `llguidance.LLTokenizer`: the library is imported with the first grammar."""

    @property
    def vocab_size(self) -> int: ...
    def is_special_token(self, token: int, /) -> bool: ...
    def decode_bytes(self, tokens: list[int], /) -> bytes: ...
    def tokenize_bytes(self, text: bytes, /) -> list[int]: ...
    def tokenize_partial(self, text: bytes, /, *, recent_tokens: list[int]) -> tuple[list[int], bytes]: ...


class _Parser(Protocol):
    """What is used of `llguidance.LLMatcher`."""

    def consume_token(self, token: int, /) -> bool: ...
    def deep_copy(self) -> "_Parser": ...
    def get_error(self) -> str: ...
    def is_error(self) -> bool: ...
    def is_stopped(self) -> bool: ...
    def rollback(self, num_tokens: int, /) -> bool: ...
    def try_consume_tokens(self, tokens: list[int], /) -> int: ...
    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int, /) -> None: ...
    def validate_tokens(self, tokens: list[int], /) -> int: ...


class Forcing:
    """Finds the ids that a grammar forces, by a walk of bounded length. Immutable, so threads may share it.

    The library's own search has no bound: a schema of 200 bytes can force endless text, and computing a mask includes
    that search. So grammars are compiled without it (`guidance.compiler`). This walk goes from mask to mask, along
    tokens of a single byte, as long as all allowed ids begin with the same byte.
    """

    def __init__(self, vocabulary: _Vocabulary) -> None:
        """Read the text of every id; takes about 0.1 s for 150,000."""
        self.vocabulary = vocabulary
        size = vocabulary.vocab_size
        self.num_words = -(-size // 32)
        self._first_bytes = np.full(size, -1, np.int16)  # -1: special, so nothing is forced where it is allowed
        self._single_ids = np.full(256, -1, np.int64)  # -1 where the vocabulary lacks a byte: the walk ends there
        for token_id in range(size):
            text = b"" if vocabulary.is_special_token(token_id) else vocabulary.decode_bytes([token_id])
            if text:
                self._first_bytes[token_id] = text[0]
            if len(text) == 1:
                self._single_ids[text[0]] = token_id
        begins = np.zeros((256, self.num_words * 32), np.bool_)
        known = np.flatnonzero(self._first_bytes >= 0)
        begins[self._first_bytes[known], known] = True
        self._others: Bits = ~np.packbits(begins, axis=1, bitorder="little").view(np.int32)  # (256, vocab_size / 32)

    def fill(self, matcher: _Parser, recent: Sequence[int], mask: Bits) -> list[int]:
        """Write which ids may follow, and find the forced ones. The matcher's state stays as it is.

        Args:
            recent: The last ids of the output; tokenization depends on them.
            mask: (vocab_size / 32,) overwritten. Allows only the first forced id if there is one, so that the output is
                the same whether forced ids are sampled or not.

        Returns:
            Forced ids, as the tokenizer splits the text. Often none.
        """
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._only_byte(mask) is None:
            return []
        forced = self._tokens(*self._walk(matcher, mask), recent)
        if forced:
            allow_only(forced[0], mask)
        return forced

    def _walk(self, matcher: _Parser, mask: Bits) -> tuple[bytes, bool]:
        """The forced bytes from a state with this mask, and whether the output ends with them."""
        found = bytearray()
        mask = mask.copy()
        ahead = matcher.deep_copy()  # a copy: it may reach a dead end, which is no fault yet
        while len(found) < MAX_FORCED_BYTES and (byte := self._only_byte(mask)) is not None:
            if ahead.try_consume_tokens([int(self._single_ids[byte])]) == 0:
                break
            found.append(byte)
            if ahead.is_stopped():
                break
            ahead.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if ahead.is_error():
                break
        return bytes(found), ahead.is_stopped() and not ahead.is_error()

    def _only_byte(self, mask: Bits) -> int | None:
        """The byte with which every allowed id begins; None if there are several, or it is no token by itself."""
        word = int((mask != 0).argmax())
        bits = int(mask[word])
        if bits == 0:
            return None
        byte = int(self._first_bytes[word * 32 + (bits & -bits).bit_length() - 1])
        if byte < 0 or self._single_ids[byte] < 0 or (mask & self._others[byte]).any():
            return None
        return byte

    def _tokens(self, found: bytes, is_end: bool, recent: Sequence[int]) -> list[int]:
        """The tokens of these bytes that hold whatever follows them."""
        try:
            text = codecs.getincrementaldecoder("utf-8")().decode(found).encode()  # drops a cut character
        except UnicodeDecodeError:  # it begins inside a character
            return []
        token_ids, rest = self.vocabulary.tokenize_partial(text, recent_tokens=list(recent))
        if is_end:
            token_ids += self.vocabulary.tokenize_bytes(rest)
            rest = b""
        # Some tokenizers put a space before every text; then nothing is forced.
        return token_ids if self.vocabulary.decode_bytes(token_ids) + rest == text else []


def allow_only(token_id: int, mask: Bits) -> None:
    """Make a mask allow a single id."""
    mask.fill(0)
    mask.view(np.uint32)[token_id // 32] = 1 << token_id % 32


_NUM_RECENT = 16
"""Last ids kept for the tokenizer: more than a pre-tokenized piece of text has."""


class GrammarMatcher:
    """A grammar and the output so far. Used by one thread at a time."""

    def __init__(self, matcher: _Parser, forcing: Forcing) -> None:
        """Take a grammar that was compiled without the library's own forcing."""
        self._matcher = matcher
        self._forcing = forcing
        self._recent: deque[int] = deque(maxlen=_NUM_RECENT)
        self._forced: deque[int] = deque()
        """Forced ids, as far as they were searched: a run of them is computed once, from its start."""
        self._mask: Bits | None = None
        """What may follow the known output; None if it was not computed yet."""

    def copy(self) -> "GrammarMatcher":
        """Return an independent matcher in the same state."""
        other = GrammarMatcher(self._matcher.deep_copy(), self._forcing)
        other._recent, other._forced, other._mask = self._recent.copy(), self._forced.copy(), self._mask
        return other

    @property
    def is_stopped(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._matcher.is_stopped()

    def accept(self, token_id: int) -> str | None:
        """Consume one sampled id; return why the output cannot go on, or None."""
        if token_id == NO_TOKEN_ID:
            return "no token is left that both the grammar and the other parameters of the request allow"
        self._mask = None
        self._recent.append(token_id)
        if self._forced and self._forced.popleft() != token_id:
            self._forced.clear()
        if not self._matcher.is_error() and self._matcher.consume_token(token_id):
            return None
        return f"the grammar cannot be followed any further: {one_line(self._matcher.get_error())}"

    def forced_token_ids(self, most: int) -> list[int]:
        """Up to `most` forced ids: masks allow nothing else at their positions. Often none."""
        if not self._forced and self._mask is None and not self.is_stopped:
            self._look()
        return list(islice(self._forced, most))

    def allows(self, draft_token_ids: tuple[int, ...], token_id: int) -> bool:
        """Whether an id may follow the output and these drafts."""
        num_consumed = self._matcher.try_consume_tokens(list(draft_token_ids))
        is_allowed = num_consumed == len(draft_token_ids) and self._matcher.validate_tokens([token_id]) == 1
        self._matcher.rollback(num_consumed)
        return is_allowed

    def fill_masks(self, draft_token_ids: tuple[int, ...], masks: Bits) -> None:
        """Write which ids may follow the output, and which may follow each draft. The state stays as it is.

        Args:
            draft_token_ids: Guesses for the next ids, in order.
            masks: (1 + num_drafts, vocab_size / 32) one bit per id; C-contiguous. Rows behind a draft that the
                grammar refuses or ends with stay as they are: nothing is sampled from them.
        """
        num_consumed = 0
        forced = self.forced_token_ids(len(masks))
        for index, row in enumerate(masks):
            drafts = list(draft_token_ids[index : index + 1])
            if index == 0 and self._mask is not None:
                row[:] = self._mask
            elif forced:
                allow_only(forced[0], row)
            else:
                forced = self._forcing.fill(self._matcher, [*self._recent, *draft_token_ids[:index]], row)
            if not drafts or (forced and drafts != forced[:1]) or self._matcher.try_consume_tokens(drafts) == 0:
                break
            forced = forced[1:]
            num_consumed += 1
            if self.is_stopped:
                break
        if num_consumed:
            self._matcher.rollback(num_consumed)

    def _look(self) -> None:
        """Compute the mask and the forced ids behind the known output."""
        self._mask = np.full(self._forcing.num_words, -1, np.int32)
        self._forced.extend(self._forcing.fill(self._matcher, self._recent, self._mask))


_SOURCE_LINE = re.compile(r"\s*(\d+ \||\^+\s*$|<)")
_TOO_MUCH = re.compile(r"(lexer error: )?too many expressions.*|Unable to determine if regex is empty.*")
_MAX_FAULT_CHARS = 300


def one_line(fault: str) -> str:
    """The library's message for a fault, without the source that it quotes, which may be long."""
    lines = [line.strip() for line in fault.partition("<backtrace>")[0].splitlines() if not _SOURCE_LINE.match(line)]
    text = " ".join(filter(None, lines))
    text = _TOO_MUCH.sub("repeats, lengths and patterns of one text take too much together", text)
    return text if len(text) <= _MAX_FAULT_CHARS else f"{text[:_MAX_FAULT_CHARS]}..."


_MAX_BEFORE_BEGIN = 8
"""If reasoning has not begun within this many tokens, the model skips it."""


class ReasoningProgress:
    """Progress of the reasoning of one choice; `has_ended` once it is over. Owned by the request.

    Tells when the budget forces the reasoning to end. O(1) for each output id.
    """

    def __init__(self, budget: ReasoningBudget) -> None:
        """Start with no output."""
        self.budget = budget
        self._num_output_tokens = 0
        self._start = 0 if budget.begin_token_id is None else None
        self.has_ended = False

    def append(self, token_id: int) -> None:
        """Note the next id of the output."""
        self._num_output_tokens += 1
        if self._start is not None:
            self.has_ended = self.has_ended or token_id == self.budget.end_token_id
        elif token_id == self.budget.begin_token_id and self._num_output_tokens <= _MAX_BEFORE_BEGIN:
            self._start = self._num_output_tokens

    def is_used_up(self, draft_token_ids: Iterable[int] = ()) -> bool:
        """Whether the end of reasoning must come next, if these drafts are accepted. O(drafts)."""
        progress = self
        for token_id in draft_token_ids:
            progress = copy.copy(self) if progress is self else progress
            progress.append(token_id)
        if progress._start is None or progress.has_ended:
            return False
        return progress._num_output_tokens >= progress._start + self.budget.max_tokens
