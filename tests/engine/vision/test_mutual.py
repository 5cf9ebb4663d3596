"""Pictures of Gemma, whose tokens see each other: greedy ids and log-probabilities are those of transformers."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from transformers import PreTrainedModel

from tests.engine.runs import run
from tests.gemma_picture_checkpoints import WRITERS
from tests.picture_checkpoints import expected, picture, processor_of
from weft.engine.start.startup import Started, start
from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import TokensInput, TokenSpan
from weft.engine.wire.messages import AddRequest, EngineOptions
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.pictures import Picture, PictureArray

Checkpoint = tuple[Path, PreTrainedModel]
NUM_IDS = 8
LARGE, TALL, SMALL = picture(1, 80, 50), picture(2, 31, 64), picture(3, 20, 20)
PROMPTS = {
    "one at the start": ("{}what is it?", [LARGE]),
    "one at the end": ("what is it?{}", [TALL]),
    "three of several sizes, two side by side": ("first {} then {}{} and so on", [LARGE, SMALL, TALL]),
    "the same one twice": ("{} or {}", [SMALL, SMALL]),
    "only words": ("only words", []),
}


@pytest.fixture(scope="module", params=sorted(WRITERS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("gemma")
    return folder, WRITERS[request.param](folder)


def started(folder: Path, **options: Any) -> Started:
    options = {"block_size": 8, "max_num_seqs": 8, "kv_cache_memory": 4 << 20, "pictures": True, **options}
    options["kernels"] = {"threads": "1"}  # of tensors this small, a second thread only spins
    return start(EngineOptions(model=str(folder), device="cpu", dtype="float32", **options), "test")


def shown(folder: Path, text: str) -> str:
    return text.replace("{}", processor_of(folder).image_token)


def asked(folder: Path, text: str, images: list[Image.Image], number: int, **params: Any) -> AddRequest:
    """A request as the server makes it."""
    processor = processor_of(folder)
    ids = processor(text=shown(folder, text), images=images or None)["input_ids"][0]
    token_id = processor.tokenizer.image_token_id
    places, spans, pictures = [i for i, each in enumerate(ids) if each == token_id], [], []
    for image in images:
        made = dict(processor(text=processor.image_token, images=[image], return_tensors="pt"))
        num = made["input_ids"][0].tolist().count(token_id)
        spans.append(TokenSpan(places[0], num, hashlib.blake2b(image.tobytes(), digest_size=16).digest()))
        places, arrays, data = places[num:], {}, b""
        for name in made.keys() & {"pixel_values", "image_position_ids"}:
            kind = str(made[name].dtype).removeprefix("torch.")
            arrays[name] = PictureArray(kind, tuple(made[name].shape), len(data))
            data += made[name].numpy().tobytes()
        pictures.append(Picture(token_id, arrays, data))
    assert not places
    given = TokensInput(ids, spans=spans, pictures=pictures)
    return AddRequest(given, SamplingParams(temperature=0, max_tokens=NUM_IDS, **params), request_id=number)


def ids_of(built: Started, *adds: AddRequest) -> list[list[int]]:
    outputs = run(built.engine, list(adds))
    return [list(outputs[add.request_id, 0].token_ids) for add in adds]


def theirs(checkpoint: Checkpoint, text: str, images: list[Image.Image]) -> list[int]:
    folder, model = checkpoint
    return expected(model, folder, shown(folder, text), images, NUM_IDS)[1]


def longest_of(checkpoint: Checkpoint) -> int:
    """Most tokens of a picture that see each other."""
    return 9 if checkpoint[1].config.model_type == "gemma3" else 70


@pytest.mark.parametrize("spare", [0, None])
def test_greedy_ids_are_those_of_transformers(checkpoint: Checkpoint, spare: int | None) -> None:
    """All prompts side by side, with room for everything or in steps that barely hold a picture and a few tokens.

    A block is smaller than a picture.
    """
    folder = checkpoint[0]
    budget = {"max_num_batched_tokens": longest_of(checkpoint) + 5 + spare} if spare is not None else {}
    built = started(folder, max_num_seqs=5, block_size=4, **budget)
    adds = [asked(folder, *prompt, number) for number, prompt in enumerate(PROMPTS.values())]
    assert ids_of(built, *adds) == [theirs(checkpoint, *prompt) for prompt in PROMPTS.values()]


def test_logprobs_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    """Of all tokens of a prompt, so that each token of a picture counts by itself."""
    folder, model = checkpoint
    text, images = PROMPTS["three of several sizes, two side by side"]
    (output,) = run(started(folder).engine, [asked(folder, text, images, 1, prompt_logprobs=0)]).values()
    made = processor_of(folder)(text=shown(folder, text), images=images, return_tensors="pt")
    with torch.inference_mode():
        logprobs = model(**made).logits[0].log_softmax(-1)
    expected_ones = logprobs[:-1].gather(1, made["input_ids"][0, 1:, None])[:, 0]
    found = torch.tensor([each.logprob for each in output.prompt_logprobs or [] if each is not None])
    torch.testing.assert_close(found, expected_ones, atol=1e-3, rtol=0)


def test_a_cached_prefix_may_end_within_a_picture(checkpoint: Checkpoint) -> None:
    """Its blocks were computed with the whole picture in view; the rest of the picture sees the whole, too."""
    folder = checkpoint[0]
    for length in range(16):  # where the last block before the questions part ends within the picture
        begin = "a" * length + "{}"
        add = asked(folder, begin + "what?", [LARGE], 1)
        (span,) = add.input.spans
        end = span.start + span.num_tokens
        cached = end // 16 * 16
        if span.start < cached < end - 2:
            break
    built = started(folder, block_size=16)
    ids_of(built, add)
    outputs = run(built.engine, [asked(folder, begin + "Why?", [LARGE], 2)])
    assert list(outputs[2, 0].token_ids) == theirs(checkpoint, begin + "Why?", [LARGE])
    assert outputs[2, 0].num_cached_tokens == cached


def test_a_preempted_request_goes_on(checkpoint: Checkpoint) -> None:
    """In the middle of its prompt, and with what it had computed in the prefix cache."""
    folder = checkpoint[0]
    text, images = PROMPTS["three of several sizes, two side by side"]
    built = started(folder, max_num_seqs=2, block_size=8, max_num_batched_tokens=longest_of(checkpoint) + 10)
    engine, ids = built.engine, list[int]()
    engine.add(0, asked(folder, text, images, 1))
    for number in range(50):
        if number == 2:
            engine.scheduler._preempt(engine.scheduler.running[0])
        ids += [token_id for _, output in engine.step() for token_id in output.token_ids]
    assert engine.scheduler.counters.num_preemptions == 1 and not engine.has_work
    assert ids == theirs(checkpoint, text, images)


def test_a_step_must_have_room_for_a_picture(checkpoint: Checkpoint) -> None:
    folder, model = checkpoint
    longest, options = longest_of(checkpoint), {"max_num_seqs": 2, "block_size": 4}
    sees_back = model.config.get_text_config().use_bidirectional_attention is None
    for pictures in (True, False):
        small = {**options, "pictures": pictures, "max_num_batched_tokens": longest + 1}
        if pictures and not sees_back:
            with pytest.raises(ModelError, match=f"max_num_seqs \\+ the {longest} tokens of a picture = {longest + 2}"):
                started(folder, **small)
        else:
            started(folder, **small)


def test_a_picture_of_more_tokens_is_refused(checkpoint: Checkpoint) -> None:
    """It would wait for ever for a step that computes all of them."""
    folder, model = checkpoint
    given = asked(folder, "{}", [LARGE], 1).input
    assert isinstance(given, TokensInput)
    (span,) = given.spans
    token_id, num_tokens = given.token_ids[span.start], longest_of(checkpoint) + 1
    longer = replace(given, token_ids=[token_id] * num_tokens, spans=[replace(span, start=0, num_tokens=num_tokens)])
    limits = started(folder).engine._limits
    assert given.fault(1000, limits) is None
    fault = f"a picture must have at most {num_tokens - 1} tokens side by side, got {num_tokens}"
    sees_back = model.config.get_text_config().use_bidirectional_attention is None
    assert longer.fault(1000, limits) == (None if sees_back else fault)
