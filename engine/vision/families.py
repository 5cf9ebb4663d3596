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
        sections: Of `Vision`, where config.json has no mrope_section; empty for a family whose pictures have no rows.
        is_interleaved: Of `Vision`.
        is_stacked: Whether features of several layers of what sees are added behind the first layers of the text half.
        longest: Where tokens of a picture see each other, the field that says how many they are at most, in config.json
            or in the settings of the processor, and its default; None: each sees those before it.
        embeds_padding: Whether the embeddings that such a token has for each layer are those of padding.
        is_attended: See `Picture`. Of the checkpoint this needs `vision_model` and `multi_modal_projector`.
    """

    processor: str | None = None
    least_tokens: int = 1
    sections: tuple[int, ...] = ()
    is_interleaved: bool = False
    is_stacked: bool = False
    longest: tuple[str, int] | None = None
    embeds_padding: bool = False
    is_attended: bool = False


_QWEN2 = SeeingFamily(sections=(16, 24, 24))
_QWEN3 = SeeingFamily(sections=(24, 20, 20), is_interleaved=True, is_stacked=True)
_QWEN3_5 = SeeingFamily(sections=(11, 11, 10), is_interleaved=True)


SEEING: Final[Mapping[str, SeeingFamily]] = {
    "AyaVisionForConditionalGeneration": SeeingFamily(),
    "DeepseekVLForConditionalGeneration": SeeingFamily(),
    "DeepseekVLHybridForConditionalGeneration": SeeingFamily(),
    "Exaone4_5_ForConditionalGeneration": SeeingFamily(),
    "Gemma3ForConditionalGeneration": SeeingFamily(longest=("mm_tokens_per_image", 256)),
    "Gemma4ForConditionalGeneration": SeeingFamily(longest=("max_soft_tokens", 280), embeds_padding=True),
    "HyperCLOVAXVisionV2ForConditionalGeneration": SeeingFamily(),
    "Idefics3ForConditionalGeneration": SeeingFamily(),
    "InternVLForConditionalGeneration": SeeingFamily(),
    "LightOnOcrForConditionalGeneration": SeeingFamily(),
    "LlavaForConditionalGeneration": SeeingFamily(),
    "LlavaNextForConditionalGeneration": SeeingFamily(),
    "LlavaNextVideoForConditionalGeneration": SeeingFamily(),
    "LlavaOnevisionForConditionalGeneration": SeeingFamily(),
    "Mistral3ForConditionalGeneration": SeeingFamily(least_tokens=2),
    "MllamaForConditionalGeneration": SeeingFamily(is_attended=True),
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "SmolVLMForConditionalGeneration": SeeingFamily(processor="Idefics3Processor"),
    "VideoLlama3ForConditionalGeneration": SeeingFamily(),
    "VipLlavaForConditionalGeneration": SeeingFamily(),
}
"""By architecture. The pictures of all others are refused, and their text half is served."""
