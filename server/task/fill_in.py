"""`suffix`: builds fill-in-the-middle prompts, for models whose vocabulary has tokens for them.

The tokens tell the family.
"""

from dataclasses import dataclass
from typing import NamedTuple

from weft.server.errors import UnsupportedParameterError
from weft.server.text.text_tokenizer import TextTokenizer


class _FillInFamily(NamedTuple):
    """Tokens before the first part, before the second part and after both; and extra tokens that end the output.

    Each family was trained with one order of prefix and suffix.
    """

    tokens: tuple[str, ...]
    ends: tuple[str, ...] = ()
    is_suffix_first: bool = False


_FILL_IN_FAMILIES = (
    # Qwen 2.5 and 3 Coder, CodeGemma, Granite 4
    _FillInFamily(
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<|endoftext|>", "<|file_separator|>", "<|file_sep|>", "<|repo_name|>", "<|fim_pad|>"),
    ),
    # StarCoder, Granite 3
    _FillInFamily(
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ("<|endoftext|>", "<file_sep>", "<repo_name>", "<fim_pad>")
    ),
    # SantaCoder
    _FillInFamily(("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ("<|endoftext|>",)),
    # DeepSeek Coder and V2, V3
    _FillInFamily(
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 (so they are written)
        ("<|EOT|>",),
    ),
    # Code Llama
    _FillInFamily(("▁<PRE>", "▁<SUF>", "▁<MID>"), ("▁<EOT>",)),
    # GLM 4
    _FillInFamily(("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>")),
    # Seed Coder
    _FillInFamily(("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"), is_suffix_first=True),
    # Codestral: the output follows the prefix
    _FillInFamily(("[SUFFIX]", "[PREFIX]"), is_suffix_first=True),
)


@dataclass(frozen=True, slots=True)
class FillIn:
    """How this vocabulary asks for the middle. `stop_token_ids` end the output, as do the model's own stop ids."""

    token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    is_suffix_first: bool

    def prompt(self, token_ids: list[int], suffix_ids: list[int], bos_token_id: int | None) -> list[int]:
        """The prompt that asks for the text between prefix and suffix. A beginning-of-text token stays in front."""
        has_bos = token_ids[:1] == [bos_token_id]
        prefix_ids = token_ids[has_bos:]
        first, second = (suffix_ids, prefix_ids) if self.is_suffix_first else (prefix_ids, suffix_ids)
        begin, between, *end = self.token_ids
        return [*token_ids[:has_bos], begin, *first, between, *second, *end]


def fill_in(tokenizer: TextTokenizer) -> FillIn:
    """Find the family of a vocabulary by its tokens.

    Raises:
        UnsupportedParameterError: The vocabulary has no tokens for filling in the middle.
    """
    for family in _FILL_IN_FAMILIES:
        ids = {token: tokenizer.token_id(token) for token in (*family.tokens, *family.ends)}
        known = {token: i for token, i in ids.items() if i is not None}
        if all(token in known for token in family.tokens):
            token_ids = tuple(known[token] for token in family.tokens)
            return FillIn(token_ids, tuple(dict.fromkeys(known.values())), family.is_suffix_first)
    raise UnsupportedParameterError(
        "suffix is not supported by this model: its vocabulary has no tokens for filling in the middle", param="suffix"
    )
