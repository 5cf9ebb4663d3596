"""Turns the token ids of an output into text, one id at a time, and finds stop strings in it.

Owns the bytes of a character that is not complete, and text that may become a stop string. Invariants: the joined
results are `Tokenizer.decode` of all ids; no result holds part of a character; only bytes that can still become a valid
character are held, at most three.

Deliberate difference from the `tokenizers` library: if one byte in a run of byte tokens such as <0xE4> is invalid, the
library turns the whole run into U+FFFD, which is known only when the run ends. Here each invalid part becomes one
U+FFFD, as for byte-level vocabularies. Valid characters in the run survive, and no text waits for the end of the run.
"""

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import tokenizers

from weft.engine.wire.bpe import byte_alphabet

_Steps: TypeAlias = list[dict[str, Any]]

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_OF = {char: byte for byte, char in enumerate(byte_alphabet())}


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes, filled on first use. An id outside the vocabulary stands for no bytes and takes no entry.

    A vocabulary of 150,000 would cost 15 MB. Threads may share it: an entry that two of them make is the same.
    """

    def __init__(self, id_to_token: Callable[[int], str | None], to_bytes: Callable[[str], bytes]) -> None:
        """Start empty; `to_bytes` turns a vocabulary entry into the bytes that it stands for."""
        super().__init__()
        self._id_to_token = id_to_token
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id)
        if token is None:
            return b""
        data = self[token_id] = self._to_bytes(token)
        return data


@dataclass(frozen=True, slots=True)
class TokenTable:
    """How ids become text: the bytes of each, and what happens at the start of a sequence.

    Attributes:
        num_leading_spaces: Most spaces that are cut from the start of the whole text.
        first_has_no_spaces: The first token loses all of its spaces.
    """

    bytes_of: TokenBytes
    num_leading_spaces: int = 0
    first_has_no_spaces: bool = False


def read_token_table(backend: tokenizers.Tokenizer, added: Set[str]) -> TokenTable | None:
    """Read the bytes that each token id stands for from the tokenizer's decoder.

    Covers the two designs that generating models use: byte-level BPE (GPT-2, Llama 3, Qwen), whose vocabulary writes
    bytes in a printable alphabet, and SentencePiece (Llama 2, Mistral, Gemma), which writes "▁" for a space and <0x0A>
    for a byte.

    Args:
        added: Texts of the added tokens, which are not written in the printable alphabet.

    Returns:
        None for a decoder of another design, in which the text of a token depends on its neighbours.
    """
    # The state of a decoder is its JSON; asking the whole tokenizer for it would write out the vocabulary.
    steps = [] if backend.decoder is None else _flatten([json.loads(backend.decoder.__getstate__())])
    if [step["type"] for step in steps] in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return TokenTable(TokenBytes(backend.id_to_token, lambda token: _byte_level(token, added)))
    return _sentencepiece_table(backend, steps)


def _flatten(steps: _Steps) -> _Steps:
    flat: _Steps = []
    for step in steps:
        flat += _flatten(step["decoders"]) if step["type"] == "Sequence" else [step]
    return flat


def _sentencepiece_table(backend: tokenizers.Tokenizer, steps: _Steps) -> TokenTable | None:
    """Accept once each: a space mark (Replace or Metaspace), ByteFallback, Fuse, then Strip of leading spaces."""
    by_kind = {step["type"]: step for step in steps}
    replace, metaspace, strip = by_kind.get("Replace"), by_kind.get("Metaspace"), by_kind.get("Strip")
    is_known = by_kind.keys() <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
    if not is_known or len(by_kind) < len(steps) or (replace is None) == (metaspace is None):
        return None
    if replace and (replace["pattern"] != {"String": _SPACE_MARK} or replace["content"] != " "):
        return None
    if metaspace and metaspace["replacement"] != _SPACE_MARK:
        return None
    # Before Fuse, Strip would cut every token.
    if strip and ([*by_kind][-2:] != ["Fuse", "Strip"] or strip["content"] != " " or strip["stop"] != 0):
        return None
    return TokenTable(
        TokenBytes(backend.id_to_token, _with_byte_tokens if "ByteFallback" in by_kind else _with_spaces),
        num_leading_spaces=strip["start"] if strip else 0,
        first_has_no_spaces=metaspace is not None and metaspace["prepend_scheme"] != "never",
    )


def _byte_level(token: str, added: Set[str]) -> bytes:
    if token in added:
        return token.encode()
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:  # not in the alphabet: the token is its own text
        return token.encode()


def _with_spaces(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode()


def _with_byte_tokens(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else _with_spaces(token)


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


class StopStrings:
    """Finds stop strings in text that arrives in pieces, and holds back text that may become one.

    It holds the longest suffix of the text so far that is a proper prefix of some stop string, never more. Invariant:
    the released text and the match do not depend on how the text was cut into pieces. The match that ends first wins,
    as it would character by character. Of matches that end together the longest wins, which begins first. Only its
    methods mutate it.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """Start a new text.

        Args:
            include: Whether the released text keeps the stop string that ended it.

        Raises:
            ValueError: A stop string is empty.
        """
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take the next piece; return what cannot be part of a stop string. After a match, return nothing more."""
        if self.matched is not None:
            return ""
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            end, self.matched = match
            self._held = ""
            return text[: end if self._include else end - len(self.matched)]
        start = len(text) - self._num_held(text)
        self._held = text[start:]
        return text[:start]

    def finish(self) -> str:
        """The text has ended: return what is still held."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Return the end and the stop string of the match that ends first."""
        best: tuple[int, str] | None = None
        for stop in self._stops:  # longest first, so that a tie keeps the longest
            start = text.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = start + len(stop), stop
        return best

    def _num_held(self, text: str) -> int:
        """Return the length of the longest suffix that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            tail = text[max(0, len(text) - len(stop) + 1) :]
            start = tail.find(stop[0])
            while start >= 0 and not stop.startswith(tail[start:]):
                start = tail.find(stop[0], start + 1)
            if start >= 0:
                longest = max(longest, len(tail) - start)
        return longest
