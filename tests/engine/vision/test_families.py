"""Every record of a family that sees is one of transformers' models, has a native text half, and is tested."""

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from weft.engine.families.registry import text_half
from weft.engine.families.switches import FAMILIES
from weft.engine.fields import Fields
from weft.engine.vision.families import SEEING

TESTS = Path(__file__).parents[2]
MODEL_TYPES = {
    architecture: model_type
    for model_type, names in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
    for architecture in ((names,) if isinstance(names, str) else names)
}


@pytest.mark.parametrize("architecture", SEEING)
def test_the_text_half_is_native(architecture: str) -> None:
    config = CONFIG_MAPPING[MODEL_TYPES[architecture]]()
    text = {"model_type": config.get_text_config().model_type}
    half = text_half(architecture, Fields({"text_config": text}, "config.json"))
    assert half is not None and half[0] in FAMILIES


@pytest.mark.parametrize("architecture", SEEING)
def test_a_tiny_checkpoint_of_it_is_written(architecture: str) -> None:
    """Each file `tests/*picture_checkpoints.py` writes some, named by the class of their configuration."""
    texts = [path.read_text() for path in TESTS.glob("*picture_checkpoints.py")]
    config = architecture.replace("ForConditionalGeneration", "Config")
    assert any(config in text for text in texts)
