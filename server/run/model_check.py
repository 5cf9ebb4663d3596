"""Checks that a checkpoint's tokenizer and chat template fit its model, in milliseconds.

Reads only the files. `weft serve` does this before it starts anything, `weft plan` and `weft doctor` report the same.
Whether the tokenizer library can load the files is not checked here.
"""

import pathlib

import msgspec

from weft.engine.models.families.registry import identify
from weft.server.settings import StartError
from weft.server.text.chat_template import NO_TEMPLATE, ChatTemplateError
from weft.server.text.template_files import read_chat_templates


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[object] = {}


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def check_tokenizer(folder: pathlib.Path) -> list[str]:
    """What the operator should know, one sentence each. Missing and broken files are not reported here.

    Args:
        folder: A checkpoint that `checkpoint.resolve` has accepted.

    Raises:
        StartError: The tokenizer has more tokens than the model.
    """
    vocab_size = identify(folder).fields.optional_integer("vocab_size")
    try:
        tokenizer = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerFile)
        config_file = folder / "tokenizer_config.json"
        config = msgspec.json.decode(config_file.read_bytes(), type=dict[str, object]) if config_file.exists() else {}
        has_template = bool(read_chat_templates(folder, config))
    except (OSError, msgspec.DecodeError, ChatTemplateError, LookupError, TypeError, ValueError):
        return []
    notes = [] if vocab_size is None else _compare(tokenizer, vocab_size)
    return notes if has_template else [*notes, NO_TEMPLATE]


def _compare(tokenizer: _TokenizerFile, vocab_size: int) -> list[str]:
    """Some fine-tuned models lack added tokens and still work. A model that lacks a part of the vocabulary does not."""
    added = {token.id for token in tokenizer.added_tokens}
    vocab = tokenizer.model.vocab
    ids = set(vocab.values() if isinstance(vocab, dict) else range(len(vocab))) - added
    num_ids = max(ids, default=-1) + 1
    if num_ids > vocab_size:
        raise StartError(
            f"model: the tokenizer does not fit the model: it has {num_ids:,} tokens, and config.json says vocab_size "
            f"{vocab_size:,}; take the tokenizer.json that belongs to the weights"
        )
    lacking = [token.content for token in tokenizer.added_tokens if token.id >= vocab_size]
    names = ", ".join(lacking[:5]) + " ..." * (len(lacking) > 5)
    return [f"the model has no token {names}: prompts with it are refused"] if lacking else []
