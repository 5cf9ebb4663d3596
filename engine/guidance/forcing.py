"""Ids that a grammar leaves no choice about, found by a walk of bounded length.

The library has such a search too, but a schema of 200 bytes forces text without end, and the library looks for the end
of it, in its masks as well. So grammars are compiled without it (`guidance.compiler`), and this walk goes on from
mask to mask, by the tokens that are single bytes, for as long as all allowed ids begin with the same byte.
"""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = npt.NDArray[np.int32]

MAX_FORCED_BYTES = 512
"""How far the walk goes, 30 us a byte; behind the ids that it found it begins anew."""


class Forcing:
    """The vocabulary as the walk needs it. Constant, so threads may share it."""

    def __init__(self, vocabulary: "LLTokenizer") -> None:
        """Read the text behind every id; that of 150,000 takes about 0.1 s."""
        self.vocabulary = vocabulary
        size = vocabulary.vocab_size
        self.num_words = -(-size // 32)
        self._first_bytes = np.full(size, -1, np.int16)  # of special tokens too: nothing is forced where one is allowed
        self._single_ids = np.full(256, -1, np.int64)  # a vocabulary may lack some, where the walk ends
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
        """Write which ids may follow, and tell those that have to; the matcher's state stays.

        Args:
            recent: Ids just before, which have a say in how text is cut into tokens.
            mask: (vocab_size / 32,) allows nothing but the first forced id if there is one, so that an output is the
                same whether forced ids are sampled or not.

        Returns:
            Ids that have to follow, in the words of the tokenizer. Often none.
        """
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._only_byte(mask) is None:
            return []
        forced = self._tokens(*self._walk(matcher, mask), recent)
        if forced:
            allow_only(forced[0], mask)
        return forced

    def _walk(self, matcher: "LLMatcher", mask: Bits) -> tuple[bytes, bool]:
        """The forced bytes behind a state with this mask, and whether the output ends with them."""
        found = bytearray()
        mask = mask.copy()
        ahead = matcher.deep_copy()  # it may come upon a dead end, which is no fault before the output is there
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
        """The byte with which every allowed id begins; None if there are several, or no token for it alone."""
        word = int((mask != 0).argmax())
        bits = int(mask[word])
        if bits == 0:
            return None
        byte = int(self._first_bytes[word * 32 + (bits & -bits).bit_length() - 1])
        if byte < 0 or self._single_ids[byte] < 0 or (mask & self._others[byte]).any():
            return None
        return byte

    def _tokens(self, found: bytes, is_end: bool, recent: Sequence[int]) -> list[int]:
        """What the tokenizer makes of these bytes, whatever follows them."""
        try:
            text = codecs.getincrementaldecoder("utf-8")().decode(found).encode()  # without the half of a character
        except UnicodeDecodeError:  # it begins with one
            return []
        token_ids, rest = self.vocabulary.tokenize_partial(text, recent_tokens=list(recent))
        if is_end:
            token_ids += self.vocabulary.tokenize_bytes(rest)
            rest = b""
        # Some tokenizers put a space before every text.
        return token_ids if self.vocabulary.decode_bytes(token_ids) + rest == text else []


def allow_only(token_id: int, mask: Bits) -> None:
    """Let a mask allow a single id."""
    mask.fill(0)
    mask.view(np.uint32)[token_id // 32] = 1 << token_id % 32
