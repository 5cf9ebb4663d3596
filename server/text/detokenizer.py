"""Token ids to text, one id at a time.

Owns the bytes of a character that is not yet whole. Invariants: what the calls return, joined, is
`Tokenizer.decode` of all ids; no call returns part of a character; only bytes that can still become a valid
character are held, at most three. Stop strings and the hiding of tokens are others' work.

Deliberate difference from the `tokenizers` library: when one byte in a run of <0xE4>-like byte tokens is invalid, it
turns the whole run into U+FFFD, which is known only when the run ends. Here each invalid part becomes one U+FFFD, as
for byte-level vocabularies, valid characters in the run survive, and nothing waits for the end of the run.
"""

from codecs import utf_8_decode
from collections.abc import Set

import tokenizers

from weft.server.text.token_bytes import TokenTable


class BytesDetokenizer:
    """For vocabularies whose ids stand for bytes: a table and a running UTF-8 decoder."""

    def __init__(self, table: TokenTable, skipped: Set[int]) -> None:
        """Start a new text; ids in `skipped` give no text."""
        self._bytes_of = table.bytes_of
        self._skipped = skipped
        self._held = b""
        self._num_leading_spaces = table.num_leading_spaces
        self._first_has_no_spaces = table.first_has_no_spaces

    def feed(self, token_id: int) -> str:
        """See `Detokenizer`."""
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
        """See `Detokenizer`."""
        text = self._held.decode("utf-8", "replace")
        self._held = b""
        return text

    def _strip(self, text: str) -> str:
        rest = text.lstrip(" ")
        num_cut = min(self._num_leading_spaces, len(text) - len(rest))
        self._num_leading_spaces = 0 if rest else self._num_leading_spaces - num_cut
        return text[num_cut:]


class WindowDetokenizer:
    """For every other decoder: what an id adds to the text of the id before it.

    Such decoders (WordPiece, CTC, word-level) know whole characters only, and look no further than one id back.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped: Set[int]) -> None:
        """Start a new text; ids in `skipped` give no text."""
        self._backend = backend
        self._skipped = skipped
        self._window: list[int] = []

    def feed(self, token_id: int) -> str:
        """See `Detokenizer`."""
        if token_id in self._skipped or self._backend.id_to_token(token_id) is None:
            return ""
        known = self._decode(self._window)
        text = self._decode([*self._window, token_id])
        self._window = [token_id]
        return text[len(known) :]

    def finish(self) -> str:
        """See `Detokenizer`; nothing is ever held."""
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text
