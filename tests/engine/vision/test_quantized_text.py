"""A checkpoint whose text half alone is quantized sees; one whose encoder is, too, reads text."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import Idefics3ForConditionalGeneration

from tests import quantized_checkpoints
from tests.engine.vision.test_eyes import LARGE, NUM_IDS, asked, ids_of, started
from tests.picture_checkpoints import expected, write_idefics3
from weft.engine.start.model_choice import read_model

CONFIG = {
    "quant_method": "fp8",
    "weight_block_size": [16, 16],
    "modules_to_not_convert": ["model.vision_model", "model.connector", "lm_head"],
}


def written(base: Path, folder: Path, is_quantized: Callable[[str], bool]) -> Path:
    """The folder of the plain checkpoint."""
    write_idefics3(base)
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("model.safetensors", "config.json"))
    return quantized_checkpoints.write(base, folder, CONFIG, quantized_checkpoints.fp8_blocks(16, 16), is_quantized)


def test_the_encoder_is_plain_beside_a_quantized_text_half(tmp_path: Path) -> None:
    plain = written(
        tmp_path / "base", tmp_path / "x", lambda name: ".text_model." in name and name.endswith("_proj.weight")
    )
    model = Idefics3ForConditionalGeneration.from_pretrained(plain).eval()
    prompt = ("<image>what is it?", [LARGE])
    ids = expected(model, tmp_path / "x", *prompt, NUM_IDS)[1]
    assert ids_of(started(tmp_path / "x"), asked(tmp_path / "x", *prompt, 1)) == [ids]


def test_a_quantized_encoder_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path / "base", tmp_path / "x", lambda name: name.endswith("_proj.weight"))
    assert read_model(tmp_path / "x", "auto").vision is None
    assert "only text is served: pictures are not read, since what sees is quantized" in caplog.text
