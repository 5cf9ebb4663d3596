"""Searches under rules that ban or weigh ids find the beams of transformers, with an encoder and without."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import CHECKPOINTS, VOCAB_SIZE, load_reference, write_checkpoint
from tests.engine import encoder_decoder_models
from tests.engine.encoder_decoder_models import write_model
from tests.engine.test_golden import build_engine, run
from weft.engine.loop.engine import Engine
from weft.engine.loop.pending import RejectedError
from weft.engine.wire.inputs import EncoderInput, RequestInput, TokensInput
from weft.engine.wire.messages import AddRequest, BeamOptions, FinishReason, TokensOutput
from weft.engine.wire.params import SamplingParams

MAX_TOKENS = 14
STOP_IDS = (1, 2, 3, *range(20, 60, 3))
"""With many of them beams end on their way."""


class Model:
    """A checkpoint, its engine and transformers' module, and what one asks of both."""

    def __init__(self, name: str, folder: Path) -> None:
        self.has_encoder = name in encoder_decoder_models.MODELS
        if self.has_encoder:
            self.reference: Any = write_model(name, folder, num_beams=1)
        else:
            write_checkpoint(CHECKPOINTS[name], folder)
            self.reference = load_reference(folder)
        self.folder = folder

    def given(self, number: int) -> tuple[RequestInput, dict[str, Any], int]:
        """An input, the same for `generate`, and how many ids the written ones begin with."""
        highest = encoder_decoder_models.VOCAB_SIZE if self.has_encoder else VOCAB_SIZE
        ids = torch.randint(60, highest - 2, (1, 20 + number), generator=torch.Generator().manual_seed(number))
        if not self.has_encoder:
            return TokensInput(ids[0].tolist()), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids.size(1)
        begun = [self.reference.config.decoder_start_token_id, *[65, 66][:number]]
        return (
            EncoderInput(ids[0].tolist(), begun),
            {"input_ids": ids, "decoder_input_ids": torch.tensor([begun])},
            len(begun),
        )

    def expected(self, given: dict[str, Any], num_begun: int, **options: Any) -> list[list[int]]:
        """Outputs of `generate`, without the padding behind the id that ended one."""
        settings = {"max_new_tokens": MAX_TOKENS, "eos_token_id": list(STOP_IDS), "pad_token_id": 0}
        with torch.no_grad():
            rows = self.reference.generate(**given, do_sample=False, **settings | options)[:, num_begun:].tolist()
        ends = (next((i + 1 for i, token_id in enumerate(row) if token_id in STOP_IDS), len(row)) for row in rows)
        return [row[:end] for row, end in zip(rows, ends, strict=True)]


@pytest.fixture(scope="module", params=["t5", "bart", "llama3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp("rules") / request.param)


def search(
    engine: Engine, given: RequestInput, num_choices: int, beams: BeamOptions, **params: Any
) -> list[TokensOutput]:
    sampling = SamplingParams(**{"max_tokens": MAX_TOKENS, "stop_token_ids": STOP_IDS} | params)
    found = run(engine, [AddRequest(given, sampling, num_choices, beams=beams, request_id=0)])
    outputs = [found[0, index] for index in range(num_choices)]
    assert all(isinstance(output, TokensOutput) for output in outputs)
    return outputs  # type: ignore[return-value]


RULES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"min_tokens": 9}, {"min_new_tokens": 9}),
    ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    ({"no_repeat_ngram_size": 1, "min_tokens": 14}, {"no_repeat_ngram_size": 1, "min_new_tokens": 14}),
    ({"encoder_no_repeat_ngram_size": 1}, {"encoder_no_repeat_ngram_size": 1}),
    ({"bad_words_token_ids": ((70,), (71, 72), (90,))}, {"bad_words_ids": [[70], [71, 72], [90]]}),
    ({"logit_bias": {70: 2.5, 75: -3.0, 80: 1.0}}, {"sequence_bias": [[[70], 2.5], [[75], -3.0], [[80], 1.0]]}),
    ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    ({"begin_bans": tuple(range(60, 110))}, {"begin_suppress_tokens": list(range(60, 110))}),
    ({"forced_end_id": 20}, {"forced_eos_token_id": 20}),
    ({"forced_end_id": 20, "min_tokens": 14}, {"forced_eos_token_id": 20, "min_new_tokens": 14}),
    (
        {"renormalizes": True, "repetition_penalty": 1.7, "no_repeat_ngram_size": 1},
        {"renormalize_logits": True, "repetition_penalty": 1.7, "no_repeat_ngram_size": 1},
    ),
    (
        {"min_tokens": 6, "no_repeat_ngram_size": 3, "repetition_penalty": 1.2},
        {"min_new_tokens": 6, "no_repeat_ngram_size": 3, "repetition_penalty": 1.2},
    ),
]
OPTIONS = [(4, 1.0, False), (3, 2.0, True), (1, -0.5, "never"), (4, 0.0, False)]
"""Outputs, length penalty, early stopping."""


@pytest.mark.parametrize(("rule", "reference_rule"), RULES, ids=lambda rule: "+".join(rule))
def test_beams_are_those_of_transformers(model: Model, rule: dict[str, Any], reference_rule: dict[str, Any]) -> None:
    engine = build_engine(model.folder, block_size=8, overlap="min_tokens" in rule)
    for number, (num_choices, length_penalty, early_stopping) in enumerate(OPTIONS):
        given, for_reference, num_begun = model.given(number % 3)
        expected = model.expected(
            for_reference,
            num_begun,
            num_beams=4,
            num_return_sequences=num_choices,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            **reference_rule,
        )
        beams = BeamOptions(length_penalty, early_stopping, width=4)
        assert [output.token_ids for output in search(engine, given, num_choices, beams, **rule)] == expected
    assert engine.scheduler.kv.pools[0].num_used == 0


def test_a_forced_first_id_counts_as_written(tmp_path: Path) -> None:
    model = Model("bart", tmp_path)
    given, for_reference, _ = model.given(0)
    assert isinstance(given, EncoderInput)
    options = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 3.0, "early_stopping": "never"}
    expected = model.expected(for_reference, 2, forced_bos_token_id=77, **options)
    begun = EncoderInput(given.input_ids, [*given.token_ids, 77])
    beams = BeamOptions(3.0, "never", num_begun_tokens=1)
    found = search(build_engine(model.folder), begun, 4, beams, max_tokens=MAX_TOKENS - 1)
    assert [output.token_ids for output in found] == expected


@pytest.mark.parametrize("num_stops", [3, 4, 6])
def test_ends_that_come_first_do_not_narrow_a_search(tmp_path: Path, num_stops: int) -> None:
    """Of 2 * 2 continuations all ended, and nothing was left to go on with."""
    model = Model("llama3", tmp_path)
    given, for_reference, num_begun = model.given(0)
    with torch.no_grad():
        stops = model.reference(**for_reference).logits[0, -1].topk(num_stops).indices.tolist()
    options = {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 3.0, "early_stopping": "never"}
    ends = [*stops, model.reference.config.eos_token_id]
    expected = model.expected(for_reference, num_begun, eos_token_id=ends, **options)
    outputs = search(build_engine(model.folder), given, 2, BeamOptions(3.0, "never"), stop_token_ids=tuple(stops))
    assert [output.token_ids for output in outputs] == expected
    assert max(map(len, expected)) > 1


def test_few_allowed_ids_make_few_outputs(tmp_path: Path) -> None:
    """What is banned is never written, not even where nothing else is left."""
    model = Model("llama3", tmp_path)
    allowed = (5, 6, 7)
    outputs = search(
        build_engine(model.folder),
        TokensInput([9, 8]),
        4,
        BeamOptions(),
        allowed_token_ids=allowed,
        max_tokens=1,
        logprobs=8,
    )
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH] * 3 + [FinishReason.DEAD_END]
    assert sorted(output.token_ids[0] for output in outputs[:3]) == list(allowed)
    assert outputs[0].logprobs and sorted(outputs[0].logprobs[0].top_token_ids) == list(allowed)
    repeats = {"allowed_token_ids": allowed, "no_repeat_ngram_size": 1}
    outputs = search(build_engine(model.folder), TokensInput([9, 8]), 4, BeamOptions(), max_tokens=4, **repeats)
    assert {output.finish_reason for output in outputs} == {FinishReason.DEAD_END}


@pytest.mark.parametrize(
    ("beams", "params", "fault"),
    [
        (BeamOptions(width=1), {}, "the number of beams must be from 2, for as many choices, to 32, got 1"),
        (BeamOptions(width=33), {}, "the number of beams must be from 2, for as many choices, to 32, got 33"),
        (BeamOptions(num_begun_tokens=3), {}, "num_begun_tokens must be from 0 to 2, got 3"),
        (BeamOptions(), {"prompt_logprobs": 1}, "prompt_logprobs and logprob_token_ids cannot be reported with beams"),
    ],
)
def test_what_no_search_can_do_is_refused(tmp_path: Path, beams: BeamOptions, params: Any, fault: str) -> None:
    engine = build_engine(Model("llama3", tmp_path).folder)
    with pytest.raises(RejectedError, match=fault):
        engine.add(0, AddRequest(TokensInput([9, 8]), SamplingParams(**params), 2, beams=beams))
