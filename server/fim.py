"""`suffix`: prompts for filling in the middle, for models whose vocabulary has tokens for it.

A vocabulary names its family; each family was trained on one order of prefix and suffix.
"""

import enum
from dataclasses import dataclass

from server.context import TextTokenizer
from server.errors import UnsupportedParameterError


class _Slot(enum.Enum):
    PREFIX = enum.auto()
    SUFFIX = enum.auto()


_PREFIX, _SUFFIX = _Slot.PREFIX, _Slot.SUFFIX


@dataclass(frozen=True, slots=True)
class _Family:
    """The prompt as tokens and slots, and the tokens besides those of the prompt that end what was filled in."""

    layout: tuple[str | _Slot, ...]
    ends: tuple[str, ...] = ()

    @property
    def tokens(self) -> list[str]:
        return [item for item in self.layout if isinstance(item, str)]


_FAMILIES = (
    # Qwen 2.5 and 3 Coder, CodeGemma, Granite 4
    _Family(
        ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),
        ("<|endoftext|>", "<|file_separator|>", "<|file_sep|>", "<|repo_name|>", "<|fim_pad|>"),
    ),
    # StarCoder, Granite 3
    _Family(
        ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),
        ("<|endoftext|>", "<file_sep>", "<repo_name>", "<fim_pad>"),
    ),
    # SantaCoder
    _Family(("<fim-prefix>", _PREFIX, "<fim-suffix>", _SUFFIX, "<fim-middle>"), ("<|endoftext|>",)),
    # DeepSeek Coder and V2, V3
    _Family(
        ("<｜fim▁begin｜>", _PREFIX, "<｜fim▁hole｜>", _SUFFIX, "<｜fim▁end｜>"),  # noqa: RUF001 (so they are written)
        ("<|EOT|>",),
    ),
    # Code Llama
    _Family(("▁<PRE>", _PREFIX, "▁<SUF>", _SUFFIX, "▁<MID>"), ("▁<EOT>",)),
    # GLM 4
    _Family(("<|code_prefix|>", _PREFIX, "<|code_suffix|>", _SUFFIX, "<|code_middle|>")),
    # Seed Coder
    _Family(("<[fim-suffix]>", _SUFFIX, "<[fim-prefix]>", _PREFIX, "<[fim-middle]>")),
    # Codestral: the suffix comes first, and the output follows the prefix
    _Family(("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX)),
)


@dataclass(frozen=True, slots=True)
class FillIn:
    """How this vocabulary asks for the middle.

    Attributes:
        layout: Token ids and slots in order.
        stop_token_ids: Ids that end the output besides the model's own.
    """

    layout: tuple[int | _Slot, ...]
    stop_token_ids: tuple[int, ...]

    def prompt(self, prefix_ids: list[int], suffix_ids: list[int]) -> list[int]:
        """The prompt between the ids of prefix and suffix; nothing is put in front."""
        given = {_PREFIX: prefix_ids, _SUFFIX: suffix_ids}
        return [i for item in self.layout for i in ([item] if isinstance(item, int) else given[item])]


def fill_in(tokenizer: TextTokenizer) -> FillIn:
    """Find the family of a vocabulary.

    Raises:
        UnsupportedParameterError: It has no tokens for filling in.
    """
    for family in _FAMILIES:
        ids = {token: tokenizer.token_id(token) for token in (*family.tokens, *family.ends)}
        known = {token: i for token, i in ids.items() if i is not None}
        if all(token in known for token in family.tokens):
            layout = tuple(known[item] if isinstance(item, str) else item for item in family.layout)
            return FillIn(layout, tuple(dict.fromkeys(known.values())))
    raise UnsupportedParameterError(
        "suffix is not supported by this model: its vocabulary has no tokens for filling in the middle", param="suffix"
    )
