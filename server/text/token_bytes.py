"""The bytes that each token id stands for, read from the tokenizer's decoder.

Covers the two designs that generating models use: byte-level BPE (GPT-2, Llama 3, Qwen), whose vocabulary writes
bytes in a printable alphabet, and SentencePiece (Llama 2, Mistral, Gemma), with "▁" for a space and <0x0A> for a
byte. Entries are made when first asked for: a vocabulary of 150,000 would cost 15 MB. Anything else is not a table of
bytes, and `read_token_table` says so with None. Knows nothing of sequences: see `detokenizer`.
"""

import json
import re
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TypeAlias, cast

import tokenizers

_Steps: TypeAlias = list[dict[str, object]]

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _printable_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte, as character -> byte: printable Latin-1 is itself, the rest follows U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _printable_alphabet()


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes, filled on first use. An id that is in no vocabulary stands for no bytes and takes no entry.

    Safe to share between threads: an entry that two of them make is the same.
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
        num_leading_spaces: Spaces cut from the start of the whole text, at most so many.
        first_has_no_spaces: The first token loses all of its spaces.
    """

    bytes_of: TokenBytes
    num_leading_spaces: int = 0
    first_has_no_spaces: bool = False


def read_token_table(backend: tokenizers.Tokenizer, added: Set[str]) -> TokenTable | None:
    """Read what the decoder does to a token.

    Args:
        added: Texts of the added tokens, which stand outside the printable alphabet.

    Returns:
        None when the decoder is of another design, where the text of a token depends on its neighbours.
    """
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return TokenTable(TokenBytes(backend.id_to_token, lambda token: _byte_level(token, added)))
    return _sentencepiece_table(backend, steps, kinds)


def _decoder_steps(backend: tokenizers.Tokenizer) -> _Steps:
    if backend.decoder is None:
        return []
    # The state of a decoder is its JSON; asking the whole tokenizer for it would write out the vocabulary.
    return _flatten([json.loads(backend.decoder.__getstate__())])


def _flatten(steps: _Steps) -> _Steps:
    flat: _Steps = []
    for step in steps:
        flat += _flatten(cast(_Steps, step["decoders"])) if step["type"] == "Sequence" else [step]
    return flat


def _sentencepiece_table(backend: tokenizers.Tokenizer, steps: _Steps, kinds: list[object]) -> TokenTable | None:
    """Accept any of: space mark (Replace or Metaspace), ByteFallback, Fuse, then Strip of leading spaces."""
    by_kind = {str(step["type"]): step for step in steps}
    replace, metaspace, strip = by_kind.get("Replace"), by_kind.get("Metaspace"), by_kind.get("Strip")
    has_mark = (
        replace is not None and replace["pattern"] == {"String": _SPACE_MARK} and replace["content"] == " "
    ) or (metaspace is not None and metaspace["replacement"] == _SPACE_MARK)
    is_known = set(kinds) <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"} and len(by_kind) == len(kinds)
    if not has_mark or not is_known or (replace is not None and metaspace is not None):
        return None
    num_leading_spaces = 0
    if strip is not None:
        # Before Fuse, Strip would cut every token.
        if kinds[-2:] != ["Fuse", "Strip"] or strip["content"] != " " or strip["stop"] != 0:
            return None
        num_leading_spaces = cast(int, strip["start"])
    to_bytes = _with_byte_tokens if "ByteFallback" in by_kind else _with_spaces
    return TokenTable(
        TokenBytes(backend.id_to_token, to_bytes),
        num_leading_spaces,
        first_has_no_spaces=metaspace is not None and metaspace["prepend_scheme"] != "never",
    )


def _byte_level(token: str, added: Set[str]) -> bytes:
    if token in added:
        return token.encode()
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:  # not written in the alphabet: the token is its own text
        return token.encode()


def _with_spaces(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode()


def _with_byte_tokens(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else _with_spaces(token)
