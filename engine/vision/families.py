"""The families of models that see: what must be known of each beside the files of a checkpoint. Imports no torch.

A new family is one record here. Its text half is a family of its own (see `families`), served natively. What it needs
of the checkpoint is transformers' `get_image_features`, which gives one feature for each token of a picture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SeeingFamily:
    """How models of one architecture see.

    Attributes:
        processor: A processor of transformers that does the same with pictures, where the own one needs more packages;
            None: the own one.
        longest: Where tokens of a picture see each other, the field that says how many they are at most, in config.json
            or in the settings of the processor, and its default; None: each sees those before it.
        embeds_padding: Whether the embeddings that such a token has for each layer are those of padding.
    """

    processor: str | None = None
    longest: tuple[str, int] | None = None
    embeds_padding: bool = False


SEEING: Final[Mapping[str, SeeingFamily]] = {
    "Gemma3ForConditionalGeneration": SeeingFamily(longest=("mm_tokens_per_image", 256)),
    "Gemma4ForConditionalGeneration": SeeingFamily(longest=("max_soft_tokens", 280), embeds_padding=True),
    "Idefics3ForConditionalGeneration": SeeingFamily(),
    "LlavaForConditionalGeneration": SeeingFamily(),
    "LlavaNextForConditionalGeneration": SeeingFamily(),
    "SmolVLMForConditionalGeneration": SeeingFamily(processor="Idefics3Processor"),
}
"""By architecture. The pictures of all others are refused, and their text half is served."""
