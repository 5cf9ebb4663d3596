"""Requests with pictures under all that may happen to them: ids and log-probabilities are those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from tests.engine.runs import run
from tests.engine.vision.test_eyes import LARGE, NUM_IDS, SMALL, TALL, asked, ids_of, num_encoded, started
from tests.picture_checkpoints import expected, picture, write_idefics3
from weft.engine import config as engine_config
from weft.engine.start.model_choice import read_model
from weft.engine.vision.eyes import tensors
from weft.engine.wire.messages import FinishReason
from weft.engine.wire.params import SamplingParams

Checkpoint = tuple[Path, PreTrainedModel]
THREE = ("first <image> then <image><image> and so on", [LARGE, SMALL, TALL])
LAST = ("what is it?<image>", [TALL])
WORDS = ("only words", [])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("idefics3")
    return folder, write_idefics3(folder)


def right(checkpoint: Checkpoint, *prompts: Any) -> list[list[int]]:
    folder, model = checkpoint
    return [expected(model, folder, *prompt, NUM_IDS)[1] for prompt in prompts]


def test_preempted_requests_see_again(checkpoint: Checkpoint) -> None:
    """More is begun than there are blocks for, and features are made anew when they are gone."""
    folder, _ = checkpoint
    prompts = [("what is it?<image>", [SMALL]), ("<image> or <image>", [TALL, LARGE])]
    adds = [asked(folder, *prompt, number) for number, prompt in enumerate(prompts)]
    num_blocks = sum(-(-len(add.input.token_ids) // 4) for add in adds) + 3
    built = started(folder, block_size=4, prefix_caching=False, kv_cache_memory=_bytes(num_blocks))
    built.engine.scheduler.mean_output_tokens, built.engine.sight._room = 0.0, 1
    assert ids_of(built, *adds) == right(checkpoint, *prompts)
    assert built.engine.scheduler.counters.num_preemptions
    assert num_encoded(built) == 5


def _bytes(num_blocks: int) -> int:
    """Of a cache with so many blocks of 4 tokens: 3 layers, 2 heads of 12 values, keys and values in float32."""
    return num_blocks * 4 * 3 * 2 * 2 * 12 * 4


@pytest.mark.parametrize("overlap", [False, True])
def test_choices_share_a_prompt(checkpoint: Checkpoint, overlap: bool) -> None:
    folder, _ = checkpoint
    built = started(folder, prefix_caching=False)
    built.engine._overlap = overlap
    prompts = [THREE, LAST, WORDS]
    adds = [replace(asked(folder, *prompt, number), num_choices=3) for number, prompt in enumerate(prompts)]
    outputs = run(built.engine, adds)
    for number, ids in enumerate(right(checkpoint, *prompts)):
        assert [list(outputs[number, index].token_ids) for index in range(3)] == [ids] * 3
    assert num_encoded(built) == 3  # two prompts have one picture in common


@pytest.mark.parametrize("chunk", [256, 7])
def test_log_probabilities_are_those_of_transformers(checkpoint: Checkpoint, chunk: int) -> None:
    folder, model = checkpoint
    made, ids = expected(model, folder, *THREE, NUM_IDS)
    params = SamplingParams(temperature=0, max_tokens=NUM_IDS, logprobs=4, prompt_logprobs=2)
    built = started(folder, max_num_batched_tokens=chunk, max_num_seqs=1, block_size=4)
    output = run(built.engine, [replace(asked(folder, *THREE, 1), sampling_params=params)])[1, 0]
    whole = torch.cat([made["input_ids"], torch.tensor([ids])], 1)
    with torch.inference_mode():
        made |= {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
        logprobs = torch.log_softmax(model(**made).logits[0].double(), -1)
    found = [*(output.prompt_logprobs or []), *(output.logprobs or [])]  # type: ignore[attr-defined]
    assert len(found) == whole.shape[1] - 1
    for place, entry in enumerate(found):
        assert entry.logprob == pytest.approx(float(logprobs[place, whole[0, place + 1]]), abs=1e-3)
        for token_id, value in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
            assert value == pytest.approx(float(logprobs[place, token_id]), abs=1e-3)


def test_pictures_are_cut_at_every_place(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint
    built, (ids,) = started(folder, prefix_caching=False, max_num_seqs=1), right(checkpoint, THREE)
    for most in range(1, 12):
        built.engine.scheduler.token_budget.max_num_tokens = most
        assert ids_of(built, asked(folder, *THREE, most)) == [ids]
    assert num_encoded(built) == 3


def test_drafts_are_verified_beside_pictures(checkpoint: Checkpoint) -> None:
    """With few ids to choose from, outputs repeat themselves; without drafts they are the same."""
    folder, _ = checkpoint
    params = SamplingParams(temperature=0, max_tokens=24, allowed_token_ids=(70, 71, 72), ignore_eos=True)
    prompts = enumerate([THREE, LAST, WORDS])
    adds = [replace(asked(folder, *prompt, number), sampling_params=params) for number, prompt in prompts]
    built = started(folder, speculative="ngram", max_num_batched_tokens=16, max_num_seqs=4)
    assert ids_of(built, *adds) == ids_of(started(folder), *adds)
    assert built.engine.scheduler.counters.num_accepted_tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_an_encoder_that_breaks_ends_one_request(checkpoint: Checkpoint, overlap: bool) -> None:
    """It ended whoever was in the step."""
    folder, _ = checkpoint
    built = started(folder)
    built.engine._overlap = overlap
    eyes = built.engine._executor._eyes  # type: ignore[attr-defined]
    encode, bad = eyes._encode, picture(9, 24, 24)

    def broken(arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        if torch.equal(arrays["pixel_values"], unwanted["pixel_values"]):
            raise torch.OutOfMemoryError
        features: torch.Tensor = encode(arrays)
        return features

    adds = [asked(folder, *THREE, 0), asked(folder, "<image>", [bad], 1), asked(folder, *LAST, 2)]
    unwanted = tensors(adds[1].input.pictures[0], torch.device("cpu"))
    eyes._encode = broken
    outputs = run(built.engine, adds)
    assert outputs[1, 0].finish_reason is FinishReason.ERROR
    assert [list(outputs[number, 0].token_ids) for number in (0, 2)] == right(checkpoint, THREE, LAST)


def test_memory_is_planned_for_a_large_picture(checkpoint: Checkpoint) -> None:
    """64 MiB in patches of 8 x 8: width 32, feed-forward 48; and the pixels in two types."""
    facts = read_model(checkpoint[0], "auto")
    assert facts.vision is not None
    num_values = (16 << 20) // 192 * (8 * 32 + 3 * 48) + 3 * (16 << 20)
    assert facts.vision.num_encoding_values == num_values
    plan = started(checkpoint[0]).plan
    assert plan.encoding_bytes == plan.activations_bytes == num_values * 4
    assert plan.lines()[1] == "activations  341 MB, to encode a picture 341 MB"


def test_a_picture_beyond_free_memory_is_refused_alone(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would end the engine for it, with all its requests."""
    folder, _ = checkpoint
    built = started(folder)
    with monkeypatch.context() as patched:
        patched.setattr(engine_config, "available_memory_bytes", lambda device: 1000)
        outputs = run(built.engine, [asked(folder, *LAST, 1), asked(folder, *WORDS, 2)])
    refused = outputs[1, 0]
    assert refused.finish_reason is FinishReason.ERROR
    assert "a picture is too large: to encode it takes about" in (refused.message or "")
    assert [list(outputs[2, 0].token_ids)] == right(checkpoint, WORDS)
    assert ids_of(built, asked(folder, *LAST, 3)) == right(checkpoint, LAST)
