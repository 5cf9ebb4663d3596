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
        is_attended: See `Picture`. Of the checkpoint this needs `vision_model` and `multi_modal_projector`.
    """

    processor: str | None = None
    is_attended: bool = False


SEEING: Final[Mapping[str, SeeingFamily]] = {
    "Idefics3ForConditionalGeneration": SeeingFamily(),
    "LlavaForConditionalGeneration": SeeingFamily(),
    "LlavaNextForConditionalGeneration": SeeingFamily(),
    "MllamaForConditionalGeneration": SeeingFamily(is_attended=True),
    "SmolVLMForConditionalGeneration": SeeingFamily(processor="Idefics3Processor"),
}
"""By architecture. The pictures of all others are refused, and their text half is served."""
