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
        least_tokens: Of a picture. transformers' module of Mistral 3 fails at one, a picture of 28 x 28 pixels or less.
    """

    processor: str | None = None
    least_tokens: int = 1


SEEING: Final[Mapping[str, SeeingFamily]] = {
    "AyaVisionForConditionalGeneration": SeeingFamily(),
    "DeepseekVLForConditionalGeneration": SeeingFamily(),
    "DeepseekVLHybridForConditionalGeneration": SeeingFamily(),
    "Exaone4_5_ForConditionalGeneration": SeeingFamily(),
    "HyperCLOVAXVisionV2ForConditionalGeneration": SeeingFamily(),
    "Idefics3ForConditionalGeneration": SeeingFamily(),
    "InternVLForConditionalGeneration": SeeingFamily(),
    "LightOnOcrForConditionalGeneration": SeeingFamily(),
    "LlavaForConditionalGeneration": SeeingFamily(),
    "LlavaNextForConditionalGeneration": SeeingFamily(),
    "LlavaNextVideoForConditionalGeneration": SeeingFamily(),
    "LlavaOnevisionForConditionalGeneration": SeeingFamily(),
    "Mistral3ForConditionalGeneration": SeeingFamily(least_tokens=2),
    "SmolVLMForConditionalGeneration": SeeingFamily(processor="Idefics3Processor"),
    "VideoLlama3ForConditionalGeneration": SeeingFamily(),
    "VipLlavaForConditionalGeneration": SeeingFamily(),
}
"""By architecture. The pictures of all others are refused, and their text half is served."""
