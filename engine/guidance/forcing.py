"""Finds the ids that a grammar forces, by a walk of bounded length.

The library's own search has no bound: a schema of 200 bytes can force endless text, and computing a mask includes that
search. So grammars are compiled without it (`guidance.compiler`). This walk goes from mask to mask, along tokens of a
single byte, as long as all allowed ids begin with the same byte.
"""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from weft.engine.step.masks import Bits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_FORCED_BYTES = 512
"""Longest walk; it takes 30 us a byte. Behind the ids that it found, a new walk begins."""


class Forcing:
    """The vocabulary as the walk needs it. Immutable, so threads may share it."""

    def __init__(self, vocabulary: "LLTokenizer") -> None:
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

    def fill(self, matcher: "LLMatcher", recent: Sequence[int], mask: Bits) -> list[int]:
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

    def _walk(self, matcher: "LLMatcher", mask: Bits) -> tuple[bytes, bool]:
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
