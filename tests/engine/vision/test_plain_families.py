"""Families whose pictures stand at plain positions: what the reader and the engine make is what transformers makes."""

import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.engine.runs import run
from tests.picture_checkpoints import encoded, expected, picture, processor_of
from tests.plain_picture_checkpoints import PLAIN, WRITERS
from weft.engine.start.startup import Started, start
from weft.engine.vision.checkpoint import read_vision
from weft.engine.fields import Fields
from weft.engine.wire.inputs import TokensInput, TokenSpan
from weft.engine.wire.messages import AddRequest, EngineOptions
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.pictures import Picture
from weft.server.pictures.child import PictureReader

NUM_IDS = 10
LARGE, TALL, SMALL = picture(1, 80, 50), picture(2, 31, 64), picture(3, 20, 20)
PROMPTS = {
    "one at the start": ("{}what is it?", [LARGE]),
    "three of several sizes": ("first {} then {}{} and so on", [LARGE, SMALL, TALL]),
    "the same one twice, at the end": ("what is {}{}", [SMALL, SMALL]),
    "only words": ("only words", []),
}


class Checkpoint:
    """A checkpoint, transformers' module of it, and the reader of its pictures."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.model: PreTrainedModel = WRITERS[name](folder)
        vision = read_vision(folder, Fields.read(folder / "config.json"))
        assert vision is not None
        self.token_id, self._target = vision.token_id, os.memfd_create("arrays")
        self.reader = PictureReader(folder, vision.token_id, self._target)
        self.tokenizer = processor_of(folder).tokenizer

    def expected(self, text: str, images: list[Image.Image]) -> tuple[list[int], list[int]]:
        """Ids of a prompt that has the sign of a picture at each {}, and how transformers goes on."""
        signs = text.replace("{}", self.reader.sign)
        made, ids = expected(self.model, self.folder, signs, images, NUM_IDS)
        return made["input_ids"][0].tolist(), ids

    def asked(self, text: str, images: list[Image.Image], number: int) -> AddRequest:
        """The request of it, read as the server reads pictures."""
        ids, spans, pictures = list[int](), list[TokenSpan](), list[Picture]()
        first, *rest = text.split("{}")
        ids += self._ids(first)
        for image, words in zip(images, rest, strict=True):
            made = self.reader.read(encoded(image))
            assert made.fault is None and made.num_tokens
            own = self._ids(made.text)
            places = [i for i, each in enumerate(own, len(ids)) if each == self.token_id]
            assert len(places) == made.num_tokens
            spans.append(TokenSpan(places[0], places[-1] + 1 - places[0], made.digest))
            pictures.append(Picture(self.token_id, made.arrays, os.pread(self._target, made.num_bytes, 0)))
            ids += own + self._ids(words)
        given = TokensInput(ids, spans=spans, pictures=pictures)
        return AddRequest(given, SamplingParams(temperature=0, max_tokens=NUM_IDS), request_id=number)

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def close(self) -> None:
        os.close(self._target)


@pytest.fixture(scope="module", params=sorted(PLAIN))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    found = Checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    yield found
    found.close()


def started(folder: Path, **options: Any) -> Started:
    options = {"block_size": 8, "kv_cache_memory": 4 << 20, "pictures": True, **options}
    return start(EngineOptions(model=str(folder), device="cpu", dtype="float32", **options), "test")


def test_greedy_ids_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    """Alone in whole prompts, then beside each other in chunks that cut every picture, and then found in the cache."""
    wanted = [checkpoint.expected(*prompt) for prompt in PROMPTS.values()]
    adds = [checkpoint.asked(*prompt, i) for i, prompt in enumerate(PROMPTS.values())]
    assert [add.input.token_ids for add in adds] == [ids for ids, _ in wanted]
    whole, chunks = started(checkpoint.folder), started(checkpoint.folder, max_num_seqs=4, max_num_batched_tokens=13)
    alone = [list(run(whole.engine, [add])[add.request_id, 0].token_ids) for add in adds]
    assert alone == [ids for _, ids in wanted]
    outputs = run(chunks.engine, adds)
    assert [list(outputs[add.request_id, 0].token_ids) for add in adds] == alone
    again = run(chunks.engine, adds)
    assert [list(again[add.request_id, 0].token_ids) for add in adds] == alone
    assert all((again[i, 0].num_cached_tokens or 0) >= len(add.input.token_ids) // 8 * 8 - 8 for i, add in enumerate(adds))


NEWER = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "image_newline": "model.image_newline",
}
"""How transformers 5 calls in memory what its files call otherwise, as do some files of its last 4."""


def test_files_may_have_the_newer_names(checkpoint: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(checkpoint.folder, tmp_path / "x")
    path = tmp_path / "x" / "model.safetensors"
    tensors = load_file(path)
    for old, new in NEWER.items():
        tensors = {name.replace(old, new, 1) if name.startswith(old) else name: t for name, t in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    add = checkpoint.asked(*PROMPTS["one at the start"], 1)
    outputs = run(started(tmp_path / "x").engine, [add])
    assert list(outputs[1, 0].token_ids) == checkpoint.expected(*PROMPTS["one at the start"])[1]
