"""Runs of ids that may not repeat: the bans are those of transformers, in every way of computing."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor

from tests.checkpoints import CHECKPOINTS, load_reference, write_checkpoint
from tests.engine.encoder_decoder_models import VOCAB_SIZE, answer, write_model
from tests.engine.requests_for_tests import add_request
from tests.engine.test_encoder_decoder import ask, ids
from tests.engine.test_golden import build_engine, greedy, run
from weft.engine.drafts import NgramDrafter
from weft.engine.request import Request, make_request
from weft.engine.wire.messages import FinishReason, TokensOutput


def request_of(add: Any) -> Request:
    clock: dict[str, Any] = {"connection": 0, "arrival": 0, "arrival_time": 0.0, "eos_token_ids": frozenset()}
    return make_request(add, max_model_len=4096, cache_seed=b"", block_size=16, **clock)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_bans_are_those_of_the_processors_of_transformers(size: int) -> None:
    draw, zeros = random.Random(size), torch.zeros(1, 6)
    for length in (1, 2, 4, 5, 6, 30, 200):
        text, begun = ([draw.randrange(6) for _ in range(n)] for n in (length, draw.choice([1, 2, 5])))
        split = draw.randrange(length + 1)
        written = begun + text

        own = NoRepeatNGramLogitsProcessor(size)(torch.tensor([written]), zeros)
        request = request_of(ask([draw.randrange(6)] * 20, begun, no_repeat_ngram_size=size))
        request.token_ids += text[:split]
        assert request.repeating_ids(text[split:]) == set(own[0].isneginf().nonzero().flatten().tolist())

        input_ids = [draw.randrange(6) for _ in range(draw.choice([1, 3, 17, 60]))]
        of_input = EncoderNoRepeatNGramLogitsProcessor(size, torch.tensor([input_ids]))(torch.tensor([written]), zeros)
        request = request_of(ask(input_ids, begun, encoder_no_repeat_ngram_size=size))
        request.token_ids += text
        assert request.repeating_ids() == set(of_input[0].isneginf().nonzero().flatten().tolist())

        of_prompt = EncoderNoRepeatNGramLogitsProcessor(size, torch.tensor([begun]))(torch.tensor([written]), zeros)
        request = request_of(add_request(begun, encoder_no_repeat_ngram_size=size))
        request.token_ids += text
        assert request.repeating_ids() == set(of_prompt[0].isneginf().nonzero().flatten().tolist())


RULES = [{"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 3}, {"encoder_no_repeat_ngram_size": 2}]


@pytest.mark.usefixtures("cheap_drafts")
@pytest.mark.parametrize(("has_drafts", "overlap"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_ids_are_those_of_transformers(tmp_path: Path, rule: dict[str, int], has_drafts: bool, overlap: bool) -> None:
    """A draft is verified against the bans behind the drafts before it."""
    model, draw = write_model("marian", tmp_path), random.Random(0)
    inputs = [[draw.randrange(3, VOCAB_SIZE - 2) for _ in range(length)] for length in (6, 17, 40)]
    start = model.config.decoder_start_token_id
    adds = [ask(input_ids, [start], number, 2, **rule) for number, input_ids in enumerate(inputs)]
    engine = build_engine(tmp_path, drafter=NgramDrafter() if has_drafts else None, overlap=overlap)
    found = run(engine, adds)
    for number, input_ids in enumerate(inputs):
        expected = answer(model, input_ids, [start], num_beams=1, max_new_tokens=12, **rule)[0, 1:].tolist()
        assert [ids(found[number, index]) for index in range(2)] == [expected] * 2
    if has_drafts and rule != RULES[0]:
        assert engine.scheduler.counters.num_draft_tokens > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_the_prompt_counts_without_an_encoder(tmp_path: Path, overlap: bool) -> None:
    write_checkpoint(CHECKPOINTS["llama3"], tmp_path)
    prompt = [9, 8, 7, 9, 8]
    with torch.no_grad():
        expected = load_reference(tmp_path).generate(  # type: ignore[operator]
            torch.tensor([prompt]), do_sample=False, max_new_tokens=10, no_repeat_ngram_size=2, pad_token_id=0
        )
    found = run(build_engine(tmp_path, overlap=overlap), [greedy(0, prompt, no_repeat_ngram_size=2)])
    assert found[0, 0].token_ids == expected[0, len(prompt) :].tolist()  # type: ignore[union-attr]


def test_an_output_ends_where_everything_would_repeat(tmp_path: Path) -> None:
    write_checkpoint(CHECKPOINTS["llama3"], tmp_path)
    allowed: dict[str, Any] = {"allowed_token_ids": (5, 6, 7), "no_repeat_ngram_size": 1}
    output = run(build_engine(tmp_path), [greedy(0, [9, 6], **allowed)])[0, 0]
    assert isinstance(output, TokensOutput) and output.finish_reason is FinishReason.DEAD_END
    assert sorted(output.token_ids) == [5, 7]
