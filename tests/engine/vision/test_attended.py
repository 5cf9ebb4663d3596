"""Layers that attend to pictures (Llama 3.2 Vision): greedy ids and log-probabilities are those of transformers."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from transformers import PreTrainedModel

from tests.engine.runs import run
from tests.engine.vision.test_eyes import ids_of, num_encoded, started
from tests.mllama_picture_checkpoints import NUM_FEATURES, SIGN, answered, logprobs_of, write_mllama
from tests.picture_checkpoints import expected, picture, processor_of
from weft.engine.start.startup import Started, start
from weft.engine.wire.inputs import TokensInput, TokenSpan
from weft.engine.wire.messages import AddRequest, EngineOptions
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


@pytest.fixture(scope="module")
def built(checkpoint: Checkpoint) -> Started:
    return started(checkpoint[0], max_num_seqs=8, max_num_batched_tokens=16)


@pytest.fixture(scope="module")
def in_chunks(checkpoint: Checkpoint) -> Started:
    """Most chunks part pictures from what is asked about them."""
    return started(checkpoint[0], max_num_seqs=1, block_size=4, max_num_batched_tokens=5, prefix_caching=False)


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
    params = {"temperature": 0, "max_tokens": NUM_IDS, **params}
    return AddRequest(given, SamplingParams(**params), request_id=number)


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_ids_are_those_of_transformers(
    checkpoint: Checkpoint, in_chunks: Started, built: Started, name: str
) -> None:
    folder, model = checkpoint
    made, ids = answered(model, folder, *PROMPTS[name], NUM_IDS)
    add = asked(folder, *PROMPTS[name], 1)
    assert add.input.token_ids == made["input_ids"][0].tolist()
    assert ids_of(built, add) == [ids]
    assert ids_of(in_chunks, add) == [ids]
    if PROMPTS[name][0].startswith(SIGN):  # then all tokens see pictures, and transformers needs no correction
        assert expected(model, folder, *PROMPTS[name], NUM_IDS)[1] == ids


def test_every_token_of_a_prompt_is_as_probable_as_in_transformers(checkpoint: Checkpoint, built: Started) -> None:
    folder, model = checkpoint
    prompt = PROMPTS["four, three in a row"]
    add = asked(folder, *prompt, 1, prompt_logprobs=0)
    found = run(built.engine, [add])[1, 0].prompt_logprobs
    assert found is not None
    pairs = zip([each.logprob for each in found], logprobs_of(model, folder, *prompt), strict=True)
    written = [pair for pair in pairs if pair[1] is not None]
    assert len(written) == len(add.input.token_ids) - 1 - len(prompt[1])
    torch.testing.assert_close(*map(torch.tensor, zip(*written, strict=True)), rtol=0, atol=1e-3)


def test_pictures_run_beside_text(checkpoint: Checkpoint, built: Started) -> None:
    """One of the requests is computed twice."""
    folder, model = checkpoint
    engine, adds = built.engine, [asked(folder, *prompt, i) for i, prompt in enumerate(PROMPTS.values())]
    for add in adds:
        engine.add(0, add)
    early = [output for _ in range(6) for _, output in engine.step()]
    preempted = next(each for each in reversed(engine.scheduler.running) if each.pictures and each.num_output_tokens)
    engine.scheduler._preempt(preempted)
    rest = run(engine, [])
    for add, prompt in zip(adds, PROMPTS.values(), strict=True):
        first = [token_id for output in early if output.request_id == add.request_id for token_id in output.token_ids]
        assert first + list(rest[add.request_id, 0].token_ids) == answered(model, folder, *prompt, NUM_IDS)[1]


def test_a_second_turn_brings_a_second_picture(checkpoint: Checkpoint) -> None:
    folder, model = checkpoint
    built, words = started(folder), "what is it? " * 4
    first, second = f"{SIGN}{words}", f"{SIGN}{words}and {SIGN}?"
    ids_of(built, asked(folder, first, [WIDE], 1))
    assert num_encoded(built) == 1
    outputs = run(built.engine, [asked(folder, second, [WIDE, SMALL], 2)])
    assert list(outputs[2, 0].token_ids) == answered(model, folder, second, [WIDE, SMALL], NUM_IDS)[1]
    num_first = len(asked(folder, first, [WIDE], 3).input.token_ids)
    assert (outputs[2, 0].num_cached_tokens or 0) >= num_first // 8 * 8 - 8 > 0
    assert num_encoded(built) == 2
    other = run(built.engine, [asked(folder, first, [TALL], 3)])[3, 0]
    assert other.num_cached_tokens == 0
    assert list(other.token_ids) == answered(model, folder, first, [TALL], NUM_IDS)[1]


def test_native_kernels_show_the_same(checkpoint: Checkpoint, built: Started) -> None:
    """bfloat16 rounds, and random weights make the most of it."""
    folder, _ = checkpoint
    options = {"device": "cpu", "dtype": "bfloat16", "kv_cache_memory": 4 << 20, "pictures": True}
    native = start(EngineOptions(model=str(folder), **options), "test")
    assert native.info.attention_backend == "native"
    add = asked(folder, *PROMPTS["four, three in a row"], 1, max_tokens=1, prompt_logprobs=0)
    both = [run(each.engine, [add])[1, 0].prompt_logprobs for each in (built, native)]
    exact, rounded = (torch.tensor([each.logprob for each in found]) for found in both if found)
    assert (exact - rounded).abs().median() < 0.05


def test_memory_is_planned_for_what_is_kept(checkpoint: Checkpoint, built: Started) -> None:
    """Of eight pictures of four tiles: keys and values of two heads in two layers."""
    _, model = checkpoint
    seeing = [model.model.vision_model, model.model.multi_modal_projector]
    num_values = sum(each.numel() for part in seeing for each in part.parameters())
    kept_bytes = 8 * 4 * NUM_FEATURES * 2 * 2 * 2 * 32 * 4
    assert built.plan.vision_bytes == num_values * 4 + kept_bytes
    assert built.engine.sight._room == kept_bytes


def test_a_text_is_answered_without_the_layers_that_see(checkpoint: Checkpoint) -> None:
    """Adapters would have to be told which tokens of a step these layers compute, so there are none of these."""
    folder, model = checkpoint
    prompt = asked(folder, *PROMPTS["none"], 1)
    for blind in (started(folder, pictures=False), started(folder, max_loras=1)):
        assert blind.info.picture_token is None and blind.plan.vision_bytes == 0
        assert ids_of(blind, prompt) == [answered(model, folder, *PROMPTS["none"], NUM_IDS)[1]]
        assert blind.info.vocab_size == model.config.text_config.vocab_size + 8


def test_the_engine_refuses_what_no_server_sends(checkpoint: Checkpoint, built: Started) -> None:
    given = asked(checkpoint[0], f"{SIGN}a", [SMALL], 1).input
    assert isinstance(given, TokensInput)
    limits = built.engine._limits
    assert given.fault(1000, limits) is None
    plain = replace(given, pictures=[replace(given.pictures[0], is_attended=False)])
    assert "is_attended must be True" in str(plain.fault(1000, limits))
    spans = [TokenSpan(i, 1, b"") for i in range(9)]
    many = TokensInput([1] * 9, spans=spans, pictures=given.pictures * 9)
    assert "at most 8 pictures for this model, got 9" in str(many.fault(1000, limits))


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_requests_whose_pictures_do_not_fit_together_both_end(
    checkpoint: Checkpoint, prefix_caching: bool, max_num_seqs: int
) -> None:
    """The tokens of each see four pictures at once, and there is room for five of these: both waited for ever."""
    folder, model = checkpoint
    pictures = [picture(10 + number, 80, 80) for number in range(8)]
    prompts = [(SIGN * 4 + "what?", pictures[:4]), (SIGN * 4 + "and what are these?", pictures[4:])]
    built = started(folder, max_num_seqs=max_num_seqs, prefix_caching=prefix_caching)
    sight, one = built.engine.sight, 4 * NUM_FEATURES * 2 * 2 * 2 * 32 * 4
    sight._room = 5 * one
    adds = [asked(folder, *prompt, number) for number, prompt in enumerate(prompts)]
    assert ids_of(built, *adds) == [answered(model, folder, *prompt, NUM_IDS)[1] for prompt in prompts]
    assert 4 * one <= sum(sight._kept.values()) <= 5 * one
