"""Models of an encoder and a decoder answer as transformers' generate, id for id, whatever else the engine does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.encoder_decoder_models import (
    LONGEST_INPUT,
    MODELS,
    NUM_OUTPUT_TOKENS,
    VOCAB_SIZE,
    answer,
    answers,
)
from tests.engine.test_golden import PreemptingScheduler, build_engine, run
from weft.engine.describe.config import load_model_config
from weft.engine.drafts import NgramDrafter
from weft.engine.loop.pending import RejectedError
from weft.engine.wire.inputs import EncoderInput, TokensInput
from weft.engine.wire.messages import AddRequest, FinishReason, RequestOutput, TokensOutput
from weft.engine.wire.params import SamplingParams


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoder-decoder")


def ask(
    input_ids: list[int], prompt: list[int], request_id: int = 0, num_choices: int = 1, **params: Any
) -> AddRequest:
    sampling = SamplingParams(temperature=0, **({"max_tokens": NUM_OUTPUT_TOKENS} | params))
    return AddRequest(EncoderInput(input_ids, prompt), sampling, num_choices, request_id=request_id)


def ids(output: RequestOutput) -> list[int]:
    """With the id that ended the output, as transformers has it."""
    assert isinstance(output, TokensOutput) and output.message is None
    is_missing = output.finish_reason is FinishReason.STOP and output.stop_token_id not in output.token_ids[-1:]
    return [*output.token_ids, output.stop_token_id] if is_missing and output.stop_token_id else output.token_ids


WAYS: list[dict[str, Any]] = [
    {"block_size": 16},
    {"block_size": 8, "overlap": True, "num_choices": 3},
    {"block_size": 32, "is_alone": True, "overlap": True},
    {"block_size": 8, "chunk": 70, "num_choices": 2},
    {"block_size": 16, "num_blocks": 12, "scheduler_type": PreemptingScheduler},
    {"block_size": 32, "num_blocks": 7, "scheduler_type": PreemptingScheduler, "overlap": True},
]
"""Sizes of blocks and budgets, one after the other or all at once, and caches too small for all."""


@pytest.mark.parametrize(("name", "way"), [(name, i % len(WAYS)) for j, name in enumerate(MODELS) for i in (j, j + 1)])
def test_ids_are_those_of_transformers(root: Path, name: str, way: int) -> None:
    expected, options = answers(root, name), dict(WAYS[way])
    num_choices, is_alone = options.pop("num_choices", 1), options.pop("is_alone", False)
    engine = build_engine(expected.folder, **options)
    adds = [
        ask(input_ids, prompt, number, num_choices)
        for number, (input_ids, prompt) in enumerate(zip(expected.inputs, expected.prompts, strict=True))
    ]
    results: dict[tuple[int, int], RequestOutput] = {}
    for batch in [[add] for add in adds] if is_alone else [adds]:
        results |= run(engine, batch)
    for number, output in enumerate(expected.outputs):
        assert [ids(results[number, index]) for index in range(num_choices)] == [output] * num_choices
    counters = engine.scheduler.counters
    assert (counters.num_preemptions > 0) == ("num_blocks" in options)
    assert counters.prompt_tokens == sum(map(len, expected.inputs + expected.prompts))
    if "num_blocks" not in options:
        assert counters.prefill_tokens == counters.prompt_tokens


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_a_forward_pass(root: Path, name: str) -> None:
    expected = answers(root, name)
    engine = build_engine(expected.folder)
    for input_ids, prompt in list(zip(expected.inputs, expected.prompts, strict=True))[:4]:
        output = run(engine, [ask(input_ids, prompt, logprobs=5, ignore_eos=True)])[0, 0]
        assert isinstance(output, TokensOutput) and output.logprobs and len(output.logprobs) == NUM_OUTPUT_TOKENS
        with torch.no_grad():
            logits = expected.model(
                input_ids=torch.tensor([input_ids]), decoder_input_ids=torch.tensor([prompt + output.token_ids])
            ).logits
        rows = torch.log_softmax(logits[0].double(), -1)[len(prompt) - 1 :]
        for entry, row in zip(output.logprobs, rows, strict=False):
            assert entry.top_logprobs == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)
            assert entry.top_logprobs == pytest.approx(row[entry.top_token_ids].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "is_scaled"),
    [
        ("t5", {}, True),
        ("t5", {"scale_decoder_outputs": False}, False),
        ("t5", {"scale_decoder_outputs": None, "tie_word_embeddings": False}, False),
        ("t5", {"scale_decoder_outputs": None, "tie_word_embeddings": None}, True),
        ("umt5", {"scale_decoder_outputs": None, "tie_word_embeddings": None}, True),
        ("umt5", {"scale_decoder_outputs": None, "tie_word_embeddings": False}, False),
        ("mt5", {"tie_word_embeddings": True}, False),
        ("mt5", {"tie_word_embeddings": None}, False),
    ],
)
def test_logits_are_scaled_as_old_and_new_files_say(
    root: Path, tmp_path: Path, name: str, changes: dict[str, Any], is_scaled: bool
) -> None:
    """Files of transformers 5 always say tie_word_embeddings, so logits were scaled that must not be."""
    config = json.loads((answers(root, name).folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    switches = load_model_config(tmp_path).switches  # type: ignore[attr-defined]
    assert (switches.logit_scale != 1.0) == is_scaled


def test_equal_inputs_share_their_blocks_and_others_do_not(root: Path) -> None:
    """What the encoder makes of a beginning depends on what follows it."""
    expected = answers(root, "t5")
    input_ids = expected.inputs[5]
    start, block_size = expected.prompts[0], 8
    engine = build_engine(expected.folder, block_size=block_size)
    others = [[*input_ids[:-1], 5], input_ids[:-1], [*input_ids, 5], input_ids[: 4 * block_size]]
    fresh = {
        number: ids(run(build_engine(expected.folder), [ask(other, start)])[0, 0])
        for number, other in enumerate([input_ids, *others])
    }
    first = run(engine, [ask(input_ids, start, 0), ask(input_ids, start, 1)])
    counters = engine.scheduler.counters
    assert counters.prefill_tokens == len(input_ids) + len(start)  # the second waits for the first
    assert counters.prefix_cache_hits == len(input_ids)
    assert ids(first[0, 0]) == ids(first[1, 0]) == fresh[0]
    for number, other in enumerate(others, 1):
        output = run(engine, [ask(other, start)])[0, 0]
        assert (ids(output), output.num_cached_tokens) == (fresh[number], 0)
    again = run(engine, [ask(input_ids, [*start, 7])])[0, 0]
    assert again.num_cached_tokens == len(input_ids)
    assert ids(again) == ids(run(build_engine(expected.folder), [ask(input_ids, [*start, 7])])[0, 0])


def test_padding_is_no_part_of_a_cached_prompt(root: Path) -> None:
    expected = answers(root, "bart")
    engine = build_engine(expected.folder, block_size=16)
    prompt = [2, *range(5, 40)]
    (first,), (second,) = (run(engine, [ask(expected.inputs[3], prompt)]).values() for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == len(expected.inputs[3]) + 32
    assert engine.scheduler.counters.prefix_cache_hits == second.num_cached_tokens
    assert ids(first) == ids(second)


def test_no_bad_word_begins_in_the_input(root: Path) -> None:
    expected = answers(root, "t5")
    input_ids, prompt, output = expected.inputs[0], expected.prompts[0], expected.outputs[0]
    words = ((input_ids[-1], prompt[0], output[0]), (7, output[0]))
    found = run(build_engine(expected.folder), [ask(input_ids, prompt, bad_words_token_ids=words)])
    assert ids(found[0, 0]) == output


@pytest.mark.parametrize("overlap", [False, True])
def test_beginning_and_end_are_ruled_as_in_transformers(root: Path, overlap: bool) -> None:
    """The last id is forced even where the output may not end yet."""
    expected = answers(root, "bart")
    engine = build_engine(expected.folder, overlap=overlap)
    for input_ids, prompt, (first, *_) in zip(expected.inputs, expected.prompts, expected.outputs, strict=True):
        stated: dict[str, Any] = {"begin_suppress_tokens": [first], "forced_eos_token_id": 2, "min_new_tokens": 5}
        found = answer(expected.model, input_ids, prompt, num_beams=1, max_new_tokens=5, **stated)[0, len(prompt) :]
        rules: dict[str, Any] = {"begin_bans": (first,), "forced_end_id": 2, "min_tokens": 5, "max_tokens": 5}
        output = run(engine, [ask(input_ids, prompt, logprobs=1, **rules)])[0, 0]
        assert isinstance(output, TokensOutput) and output.logprobs and len(output.logprobs) == 5
        assert (ids(output), output.finish_reason) == (found.tolist(), FinishReason.LENGTH)
        assert output.logprobs[-1].logprob == 0.0
        free = run(engine, [ask(input_ids, prompt, **rules | {"min_tokens": 0})])[0, 0]
        assert 2 in ids(free)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.usefixtures("cheap_drafts")
def test_drafts_change_nothing(root: Path, overlap: bool) -> None:
    """They are looked up in the input, too."""
    expected = answers(root, "marian")
    adds = [ask(input_ids, [119], number, ignore_eos=True) for number, input_ids in enumerate(expected.inputs)]
    engine = build_engine(expected.folder, drafter=NgramDrafter(), overlap=overlap)
    found, plain = run(engine, adds), run(build_engine(expected.folder), adds)
    assert {key: ids(output) for key, output in found.items()} == {key: ids(output) for key, output in plain.items()}
    assert engine.scheduler.counters.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("add", "fault"),
    [
        (ask([5] * (LONGEST_INPUT + 1), [2]), f"the input must hold from 1 to {LONGEST_INPUT} tokens, got 101"),
        (ask([], [2]), "the input must hold from 1"),
        (ask([5], []), "the decoder must begin with at least one token"),
        (ask([5], [2], forced_end_id=VOCAB_SIZE), "forced_end_id must hold token ids from 0"),
        (ask([VOCAB_SIZE], [2]), "input must hold token ids from 0"),
        (ask([5], [2] * 95), "but 111 in the prompt and 12 of output"),
        (ask([5], [2], prompt_logprobs=0), "prompt_logprobs is not supported by a model with an encoder"),
        (AddRequest(TokensInput([5]), SamplingParams()), "a model with an encoder needs an input"),
    ],
)
def test_what_cannot_be_read_is_refused(root: Path, add: AddRequest, fault: str) -> None:
    with pytest.raises(RejectedError, match=fault):
        build_engine(answers(root, "bart").folder).add(0, add)


def test_a_model_without_an_encoder_takes_no_input(checkpoint_folder: Callable[[str], Path]) -> None:
    with pytest.raises(RejectedError, match="this model has no encoder"):
        build_engine(checkpoint_folder("llama3")).add(0, ask([5], [2]))
