"""Turns token ids into text, one id at a time.

Owns the bytes of a character that is not complete. Invariants: the joined results are `Tokenizer.decode` of all ids; no
result holds part of a character; only bytes that can still become a valid character are held, at most three. Knows
nothing of stop strings.

Deliberate difference from the `tokenizers` library: if one byte in a run of byte tokens such as <0xE4> is invalid, the
library turns the whole run into U+FFFD, which is known only when the run ends. Here each invalid part becomes one
U+FFFD, as for byte-level vocabularies. Valid characters in the run survive, and no text waits for the end of the run.
"""

from codecs import utf_8_decode
from collections.abc import Set

import tokenizers

from weft.server.text.token_bytes import TokenTable


class BytesDetokenizer:
    """A `Detokenizer` for vocabularies whose ids stand for bytes: a table and a running UTF-8 decoder."""

    def __init__(self, table: TokenTable, skipped: Set[int]) -> None:
        """Start a new text; ids in `skipped` give no text."""
        self._bytes_of = table.bytes_of
        self._skipped = skipped
        self._held = b""
        self._num_leading_spaces = table.num_leading_spaces
        self._first_has_no_spaces = table.first_has_no_spaces

    def feed(self, token_id: int) -> str:
        """Take one id; return the text that is now certain."""
        if token_id in self._skipped:
            return ""
        data = self._bytes_of[token_id]
        if self._first_has_no_spaces and data:
            self._first_has_no_spaces = False
            data = data.replace(b" ", b"")
        if self._held:
            data = self._held + data
        text, num_used = utf_8_decode(data, "replace")  # not final: an incomplete character at the end is not used
        self._held = data[num_used:]
        return self._strip(text) if self._num_leading_spaces else text

    def finish(self) -> str:
        """The ids have ended: return U+FFFD for what is still held."""
        text = self._held.decode("utf-8", "replace")
        self._held = b""
        return text

    def _strip(self, text: str) -> str:
        rest = text.lstrip(" ")
        num_cut = min(self._num_leading_spaces, len(text) - len(rest))
        self._num_leading_spaces = 0 if rest else self._num_leading_spaces - num_cut
        return text[num_cut:]


class WindowDetokenizer:
    """A `Detokenizer` for all other decoders: the text that an id adds to the text of the id before it.

    Such decoders (WordPiece, CTC, word-level) know whole characters only and look back one id at most.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped: Set[int]) -> None:
        """Start a new text; ids in `skipped` give no text."""
        self._backend = backend
        self._skipped = skipped
        self._window: list[int] = []

    def feed(self, token_id: int) -> str:
        """Take one id; return the text that is now certain."""
        if token_id in self._skipped or self._backend.id_to_token(token_id) is None:
            return ""
        known = self._decode(self._window)
        text = self._decode([*self._window, token_id])
        self._window = [token_id]
        return text[len(known) :]

    def finish(self) -> str:
        """Return nothing, because nothing is ever held."""
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text
