"""Loads the vocabulary of a checkpoint for grammars: the bytes of every token id.

The only place where the engine knows text. Special tokens are the same as in the server's tokenizer, so a grammar never
matches one by its text. Reading 150,000 entries takes about 1.5 s and holds the interpreter lock, so it happens when
the engine is idle or at the first grammar, not at start.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weft.engine.guidance.compiler import InvalidGrammarError
from weft.engine.shared.tokenizer_files import TokenizerFilesError, tokenizer_folder

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA_SPECIAL_NAMES = ("additional_special_tokens", "extra_special_tokens")


class _AddedToken(msgspec.Struct):
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def load_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> "LLTokenizer":
    """Read tokenizer.json, and which tokens the files beside it declare special.

    Args:
        vocab_size: Rows of the model's logits; ids without text are never allowed.
        eos_token_ids: Allowed where a grammar accepts.

    Raises:
        InvalidGrammarError: There is no tokenizer, or it cannot be used.
    """
    import llguidance  # here, because most engines never see a grammar

    try:
        file = tokenizer_folder(folder) / "tokenizer.json"
    except TokenizerFilesError as error:
        raise InvalidGrammarError(f"a grammar needs a tokenizer: {error}") from error
    try:
        text = _declare_special(file.read_text(encoding="utf-8"), list(_declared(folder)))
        return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except Exception as error:  # the libraries raise nothing more precise
        raise InvalidGrammarError(f"grammars cannot use the tokenizer.json of this checkpoint: {error}") from error


def _declared(folder: Path) -> Iterator[str]:
    """Texts of the tokens that special_tokens_map.json and tokenizer_config.json declare special."""
    declared: dict[str, object] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            declared |= msgspec.json.decode((folder / name).read_bytes(), type=dict[str, object])
    entries = [declared.get(name) for name in _SPECIAL_NAMES]
    for extra in map(declared.get, _EXTRA_SPECIAL_NAMES):
        entries += extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    for entry in entries:
        content = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(content, str):
            yield content


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
