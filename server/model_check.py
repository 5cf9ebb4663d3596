"""Whether tokenizer and chat template fit a checkpoint's model: the same words from `weft serve`, `plan`, `doctor`."""

import pathlib

from engine.models.registry import identify
from server.chat_template import NO_TEMPLATE
from server.tokenizer import Tokenizer


def load_tokenizer(folder: pathlib.Path) -> tuple[Tokenizer, list[str]]:
    """The tokenizer of a checkpoint, and what its operator should know of it, a sentence each.

    Raises:
        TokenizerError: It cannot be read, or it is another model's.
        ModelError: config.json does not say what model it is.
    """
    tokenizer = Tokenizer.load(folder)
    misfit = tokenizer.describe_misfit(identify(folder).fields.integer("vocab_size"))
    notes = [misfit] if misfit else []
    return tokenizer, notes if tokenizer.has_chat_template else [*notes, NO_TEMPLATE]
