"""The bytes that each token id stands for, read from the tokenizer's decoder.

Covers the two designs that generating models use: byte-level BPE (GPT-2, Llama 3, Qwen), whose vocabulary writes
bytes in a printable alphabet, and SentencePiece (Llama 2, Mistral, Gemma), which writes "▁" for a space and <0x0A> for
a byte. `read_token_table` returns None for any other design. Entries are made on first use, because a vocabulary of
150,000 would cost 15 MB. Knows nothing of sequences: see `detokenizer`.
"""

import json
import re
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import tokenizers

_Steps: TypeAlias = list[dict[str, Any]]

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _printable_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte, as character -> byte: printable Latin-1 is itself, the rest follows U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _printable_alphabet()


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes, filled on first use. An id outside the vocabulary stands for no bytes and takes no entry.

    Threads may share it: an entry that two of them make is the same.
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
    """Read what the decoder does to a token.

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
