"""Pictures in the engine: greedy ids are those of transformers, in chunks, beside others and behind cached prefixes."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.runs import run
from tests.picture_checkpoints import WRITERS, expected, picture, processor_of
from weft.engine.config import resolve
from weft.engine.start.model_choice import plan_model, read_model
from weft.engine.start.startup import Started, start
from weft.engine.vision.eyes import KEPT_BYTES, Eyes
from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import TokensInput, TokenSpan
from weft.engine.wire.messages import AddRequest, EngineOptions, FinishReason
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.pictures import Picture, PictureArray

Checkpoint = tuple[Path, PreTrainedModel]
NUM_IDS = 12
LARGE, TALL, SMALL = picture(1, 80, 50), picture(2, 31, 64), picture(3, 20, 20)
PROMPTS = {
    "one at the start": ("<image>what is it?", [LARGE]),
    "one at the end": ("what is it?<image>", [TALL]),
    "three of several sizes": ("first <image> then <image><image> and so on", [LARGE, SMALL, TALL]),
    "the same one twice": ("<image> or <image>", [SMALL, SMALL]),
}


@pytest.fixture(scope="module", params=sorted(WRITERS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, WRITERS[request.param](folder)


def started(folder: Path, **options: Any) -> Started:
    options = {"block_size": 8, "kv_cache_memory": 4 << 20, "pictures": True, **options}
    return start(EngineOptions(model=str(folder), device="cpu", dtype="float32", **options), "test")


def eyes(built: Started) -> Eyes:
    found = built.engine._executor._eyes  # type: ignore[attr-defined]
    assert isinstance(found, Eyes)
    return found


def num_encoded(built: Started) -> int:
    return built.engine.scheduler.counters.pictures_encoded


def asked(folder: Path, text: str, images: list[Image.Image], number: int) -> AddRequest:
    """A request as the server makes it."""
    processor = processor_of(folder)
    ids = processor(text=text, images=images or None)["input_ids"][0]
    token_id = processor.tokenizer.convert_tokens_to_ids("<image>")
    places, spans, pictures = [i for i, each in enumerate(ids) if each == token_id], [], []
    for image in images:
        made = dict(processor(text="<image>", images=[image], return_tensors="pt"))
        num, _ = made.pop("input_ids")[0].tolist().count(token_id), made.pop("attention_mask")
        own, places = places[:num], places[num:]
        digest = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
        spans.append(TokenSpan(own[0], own[-1] + 1 - own[0], digest))
        arrays, data = {}, b""
        for name, each in made.items():
            arrays[name] = PictureArray(str(each.dtype).removeprefix("torch."), tuple(each.shape), len(data))
            data += each.numpy().tobytes()
        pictures.append(Picture(token_id, arrays, data))
    assert not places
    given = TokensInput(ids, spans=spans, pictures=pictures)
    return AddRequest(given, SamplingParams(temperature=0, max_tokens=NUM_IDS), request_id=number)


def ids_of(built: Started, *adds: AddRequest) -> list[list[int]]:
    outputs = run(built.engine, list(adds))
    return [list(outputs[add.request_id, 0].token_ids) for add in adds]


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_ids_are_those_of_transformers(checkpoint: Checkpoint, name: str) -> None:
    """Whole prompts, then all of them at once in chunks that cut every picture."""
    folder, model = checkpoint
    text, images = PROMPTS[name]
    made, ids = expected(model, folder, text, images, NUM_IDS)
    add = asked(folder, text, images, 1)
    assert add.input.token_ids == made["input_ids"][0].tolist()
    assert ids_of(started(folder), add) == [ids]
    assert ids_of(started(folder, max_num_seqs=1, block_size=4, max_num_batched_tokens=5), add) == [ids]


def test_pictures_run_beside_text(checkpoint: Checkpoint) -> None:
    folder, model = checkpoint
    prompts = [*PROMPTS.values(), ("only words", [])]
    found = ids_of(
        started(folder, max_num_seqs=8, max_num_batched_tokens=16),
        *(asked(folder, *p, i) for i, p in enumerate(prompts)),
    )
    assert found == [expected(model, folder, *prompt, NUM_IDS)[1] for prompt in prompts]


def test_a_second_turn_computes_neither_picture_nor_prefix(checkpoint: Checkpoint) -> None:
    folder, model = checkpoint
    built = started(folder)
    first, second = "<image>" + "what is it? " * 4, "<image>" + "what is it? " * 4 + "and now?"
    ids_of(built, asked(folder, first, [LARGE], 1))
    assert num_encoded(built) == 1
    outputs = run(built.engine, [asked(folder, second, [LARGE], 2)])
    assert list(outputs[2, 0].token_ids) == expected(model, folder, second, [LARGE], NUM_IDS)[1]
    assert num_encoded(built) == 1
    last = asked(folder, first, [LARGE], 3).input.token_ids
    assert (outputs[2, 0].num_cached_tokens or 0) >= len(last) // 8 * 8 - 8


def test_the_same_words_about_another_picture_share_nothing(checkpoint: Checkpoint) -> None:
    folder, model = checkpoint
    built, text = started(folder), "<image>" + "what is it? " * 4
    ids_of(built, asked(folder, text, [LARGE], 1))
    other = LARGE.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    outputs = run(built.engine, [asked(folder, text, [other], 2)])
    assert outputs[2, 0].num_cached_tokens == 0 and num_encoded(built) == 2
    assert list(outputs[2, 0].token_ids) == expected(model, folder, text, [other], NUM_IDS)[1]


def test_features_are_kept_up_to_a_bound(checkpoint: Checkpoint) -> None:
    """The room holds a picture and a half; the one that was used last is kept."""
    folder, _ = checkpoint
    built = started(folder, prefix_caching=False)
    sight, kept = built.engine.sight, eyes(built)._kept
    ids_of(built, asked(folder, "<image>a", [SMALL], 1))
    (features,) = kept.values()
    sight._room = features.nbytes * 3 // 2
    ids_of(built, asked(folder, "<image>b", [SMALL.rotate(90)], 2))
    assert len(kept) == 1 and num_encoded(built) == 2
    ids_of(built, asked(folder, "<image>c", [SMALL.rotate(90)], 3))
    assert num_encoded(built) == 2 and built.engine.scheduler.counters.picture_hits == 1
    ids_of(built, asked(folder, "<image>d", [SMALL], 4))
    assert num_encoded(built) == 3 and kept.keys() == sight._kept.keys()


@pytest.mark.parametrize("shown", [lambda features: features[1:], lambda features: torch.cat([features, features[:1]])])
def test_every_token_of_a_picture_has_one_feature(checkpoint: Checkpoint, shown: Callable[[Tensor], Tensor]) -> None:
    """Of the wrong number, all answers would be slightly wrong."""
    folder, _ = checkpoint
    built, add = started(folder), asked(folder, "<image>a", [SMALL], 1)
    seeing = eyes(built)
    encode = seeing._encode
    seeing._encode = lambda arrays: shown(encode(arrays))
    outputs = run(built.engine, [add])
    assert outputs[1, 0].finish_reason is FinishReason.ERROR
    assert (outputs[1, 0].message or "").startswith("a picture has ")
    assert not seeing._kept


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda each: replace(each, pictures=each.pictures * 2), "each of the 1 spans of the prompt must have"),
        (lambda each: with_picture(each, token_id=5), "a picture must stand at tokens 702, got 5"),
        (lambda each: with_array(each, shape=(1, 2**20)), "pixel_values must be whole"),
        (lambda each: with_array(each, start=-4), "pixel_values must be whole"),
        (lambda each: with_array(each, dtype="object"), "must be whole and hold float32, float16, bfloat16"),
    ],
)
def test_the_engine_refuses_what_no_server_sends(
    checkpoint: Checkpoint, change: Callable[[TokensInput], TokensInput], fault: str
) -> None:
    folder, _ = checkpoint
    given = asked(folder, "<image>a", [SMALL], 1).input
    assert isinstance(given, TokensInput)
    limits = started(folder).engine._limits
    assert given.fault(1000, limits) is None
    assert fault in str(change(given).fault(1000, limits))
    assert given.fault(1000) == "this model takes no pictures"


def with_picture(given: TokensInput, **fields: Any) -> TokensInput:
    return replace(given, pictures=[replace(given.pictures[0], **fields)])


def with_array(given: TokensInput, **fields: Any) -> TokensInput:
    arrays = given.pictures[0].arrays
    return with_picture(given, arrays=arrays | {"pixel_values": replace(arrays["pixel_values"], **fields)})


def test_memory_is_planned_for_what_sees(checkpoint: Checkpoint) -> None:
    folder, model = checkpoint
    facts = read_model(folder, "auto")
    config = resolve(EngineOptions(model=str(folder), device="cpu", dtype="float32", pictures=True), facts)
    text = [model.get_decoder(), model.get_output_embeddings()]
    num_values = sum(each.numel() for each in model.parameters()) - sum(p.numel() for m in text for p in m.parameters())
    assert plan_model(facts, config).vision_bytes == num_values * 4 + KEPT_BYTES
    assert "of which what sees pictures 269 MB" in started(folder).plan.lines()[0]


def test_a_tensor_that_is_missing_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(checkpoint[0], tmp_path / "x")
    tensors = load_file(tmp_path / "x" / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embeddings.patch_embedding.weight"))
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, tmp_path / "x" / "model.safetensors")
    with pytest.raises(ModelError, match=r"patch_embedding\.weight is missing from the checkpoint"):
        started(tmp_path / "x")


@pytest.mark.parametrize("changed", [{"load_format": "dummy"}, {"pictures": False}])
def test_other_ways_to_serve_it_read_only_text(checkpoint: Checkpoint, changed: dict[str, Any]) -> None:
    folder, _ = checkpoint
    built = started(folder, **changed)
    assert built.info.picture_token is None and built.plan.vision_bytes == 0
    assert started(folder).info.picture_token == 702
