"""Pictures whose tokens have rows and columns as positions: greedy ids are those of transformers for all of Qwen's."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image


from tests.engine.runs import run
from tests.picture_checkpoints import encoded, expected, picture
from tests.qwen_picture_checkpoints import SIGN, WRITERS
from weft.engine.start.startup import Started, start
from weft.engine.wire.inputs import TokensInput, TokenSpan
from weft.engine.wire.messages import AddRequest, EngineOptions
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.pictures import Picture
from weft.server.pictures.child import PictureReader

NUM_IDS = 12
LARGE, TALL, ROW = picture(1, 80, 50), picture(2, 20, 64), picture(3, 64, 8)
PROMPTS = {
    "one at the start": (f"{SIGN}what is it?", [LARGE]),
    "one at the end": (f"what is it?{SIGN}", [TALL]),
    "three of several sizes": (f"first {SIGN} then {SIGN}{SIGN} and so on", [LARGE, ROW, TALL]),
    "one row, whose tokens have as many positions": (f"what {SIGN} is it?", [ROW]),
}


class Checkpoint:
    """A checkpoint, its model in transformers, and what reads its pictures."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.model = folder, WRITERS[name](folder)
        self.token_id = self.model.config.image_token_id
        self._memory, num_threads = os.memfd_create("test"), torch.get_num_threads()
        self.reader = PictureReader(folder, self.token_id, self._memory)
        torch.set_num_threads(num_threads)

    def asked(self, text: str, images: list[Image.Image], number: int = 1, **params: Any) -> AddRequest:
        """A request as the server makes it."""
        pieces, ids = text.split("<|image_pad|>"), list[int]()
        spans, pictures = list[TokenSpan](), list[Picture]()
        tokens = self.reader._processor.tokenizer
        for i, piece in enumerate(pieces):
            if i:
                made = self.reader.read(encoded(images[i - 1]))
                spans.append(TokenSpan(len(ids), made.num_tokens, made.digest))
                data = os.pread(self._memory, made.num_bytes, 0)
                pictures.append(Picture(self.token_id, made.arrays, data, grid=made.grid))
                ids += [self.token_id] * made.num_tokens
            ids += tokens(piece)["input_ids"]
        given = TokensInput(ids, spans=spans, pictures=pictures)
        return AddRequest(given, SamplingParams(temperature=0, max_tokens=NUM_IDS, **params), request_id=number)

    def expected(self, text: str, images: list[Image.Image]) -> tuple[Any, list[int]]:
        """Tokens of the prompt, and how transformers goes on."""
        return expected(self.model, self.folder, text, images, NUM_IDS)


@pytest.fixture(scope="module", params=sorted(WRITERS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def started(folder: Path, **options: Any) -> Started:
    options = {"block_size": 8, "kv_cache_memory": 4 << 20, "pictures": True, **options}
    return start(EngineOptions(model=str(folder), device="cpu", dtype="float32", **options), "test")


def ids_of(built: Started, *adds: AddRequest) -> list[list[int]]:
    outputs = run(built.engine, list(adds))
    return [list(outputs[add.request_id, 0].token_ids) for add in adds]


def test_greedy_ids_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    """Whole prompts, chunks that cut every picture, and all beside each other."""
    whole, cut = started(checkpoint.folder), started(checkpoint.folder, max_num_seqs=1, max_num_batched_tokens=9)
    wanted, adds = [], []
    for number, (text, images) in enumerate([*PROMPTS.values(), ("only words", [])]):
        made, ids = checkpoint.expected(text, images)
        add = checkpoint.asked(text, images, number)
        assert add.input.token_ids == made["input_ids"][0].tolist()
        assert ids_of(whole, add) == [ids]
        assert ids_of(cut, add) == [ids]
        wanted.append(ids)
        adds.append(add)
    assert ids_of(started(checkpoint.folder, max_num_seqs=8, max_num_batched_tokens=24), *adds) == wanted
