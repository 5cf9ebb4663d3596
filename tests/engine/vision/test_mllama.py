"""Llama 3.2 Vision: layers that attend to pictures. Greedy ids are those of transformers."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import PreTrainedModel

from tests.engine.runs import run
from tests.engine.vision.test_eyes import eyes, ids_of, started
from tests.mllama_picture_checkpoints import NUM_FEATURES, SIGN, answered, write_mllama
from tests.picture_checkpoints import expected, picture, processor_of
from weft.engine.wire.inputs import TokensInput, TokenSpan
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.pictures import Picture, PictureArray

Checkpoint = tuple[Path, PreTrainedModel]
Prompt = tuple[str, list[Image.Image]]
NUM_IDS = 12
WIDE, TALL, SMALL, SQUARE = picture(1, 160, 20), picture(2, 31, 64), picture(3, 20, 20), picture(4, 80, 80)
PROMPTS: dict[str, Prompt] = {
    "one at the start": (f"{SIGN}what is it?", [WIDE]),
    "one behind text": (f"so, what is it?{SIGN}well", [TALL]),
    "one at the end": (f"what is it?{SIGN}", [SMALL]),
    "three of other shapes": (f"{SIGN}first {SIGN} then {SIGN} and so on", [WIDE, SMALL, TALL]),
    "four, three in a row": (f"look: {SIGN} or {SIGN}{SIGN}{SIGN} or not", [SQUARE, SMALL, TALL, WIDE]),
    "the same one twice": (f"{SIGN} or {SIGN}?", [SMALL, SMALL]),
    "none": ("only words", []),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("mllama")
    return folder, write_mllama(folder)


def asked(folder: Path, text: str, images: list[Image.Image], number: int, **params: Any) -> AddRequest:
    """A request as the server makes it."""
    processor = processor_of(folder)
    ids = processor(text=text, images=images or None)["input_ids"][0]
    token_id = processor.tokenizer.convert_tokens_to_ids(SIGN)
    spans, pictures = [], []
    for place, image in zip([i for i, each in enumerate(ids) if each == token_id], images, strict=True):
        arrays, data = {}, b""
        made = processor.image_processor([[image]], return_tensors="pt")
        for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"):
            arrays[name] = PictureArray(str(made[name].dtype).removeprefix("torch."), (*made[name].shape,), len(data))
            data += made[name].numpy().tobytes()
        spans.append(TokenSpan(place, 1, hashlib.blake2b(image.tobytes(), digest_size=16).digest()))
        pictures.append(Picture(token_id, arrays, data, is_attended=True))
    given = TokensInput(ids, spans=spans, pictures=pictures)
    return AddRequest(given, SamplingParams(temperature=0, max_tokens=NUM_IDS, **params), request_id=number)


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_ids_are_those_of_transformers(checkpoint: Checkpoint, name: str) -> None:
    """Whole prompts, then in chunks that part pictures from what is asked about them."""
    folder, model = checkpoint
    made, ids = answered(model, folder, *PROMPTS[name], NUM_IDS)
    add = asked(folder, *PROMPTS[name], 1)
    assert add.input.token_ids == made["input_ids"][0].tolist()
    assert ids_of(started(folder), add) == [ids]
    assert ids_of(started(folder, max_num_seqs=1, block_size=4, max_num_batched_tokens=5), add) == [ids]


@pytest.mark.parametrize("name", ["one at the start", "three of other shapes", "none"])
def test_behind_a_first_token_that_is_a_picture_nothing_differs(checkpoint: Checkpoint, name: str) -> None:
    """The reference is then transformers as it is."""
    folder, model = checkpoint
    assert expected(model, folder, *PROMPTS[name], NUM_IDS)[1] == answered(model, folder, *PROMPTS[name], NUM_IDS)[1]
