"""Beams of the engine beside transformers, and beside a plain search whatever there is room for."""

import logging
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from tests.checkpoints import CHECKPOINTS, VOCAB_SIZE, load_reference, write_checkpoint
from tests.engine.fake_runner import FakeEngine, make_engine, next_logprobs
from tests.engine.plain_beam_search import plain_beam_search
from tests.engine.test_golden import build_engine
from weft.engine.loop import output_collector
from weft.engine.loop.engine import Engine
from weft.engine.loop.pending import RejectedError
from weft.engine.schedule.scheduler import Scheduler
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, BeamOptions, FinishReason, Guidance, ReasoningBudget, RequestOutput
from weft.engine.wire.params import SamplingParams

STOP_IDS = (2, 3, *range(20, 60))
"""With many of them searches finish beams on their way."""


def run(engine: Engine) -> dict[int, list[RequestOutput]]:
    """Run all requests to their end; what each choice gained at once, by request."""
    outputs: dict[int, list[RequestOutput]] = {}
    for _ in range(1000):
        for _, output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.check_integrity()
        if not engine.has_work:
            return outputs
    raise AssertionError("requests wait for ever")


def choices(engine: Engine, add: AddRequest) -> list[RequestOutput]:
    """The outputs of a search, one for each choice."""
    engine.add(0, add)
    outputs = run(engine)[add.request_id]
    assert [output.index for output in outputs] == list(range(add.num_choices))
    return outputs


def until_stop(token_ids: list[int]) -> list[int]:
    """Without the padding behind the id that ended an output."""
    end = next((i + 1 for i, token_id in enumerate(token_ids) if token_id in STOP_IDS), len(token_ids))
    return token_ids[:end]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beams") / "llama3"
    write_checkpoint(CHECKPOINTS["llama3"], folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_reference(folder)


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [(1, 1.0, False), (2, 1.0, False), (4, 1.0, False), (4, 0.0, "never"), (4, 2.0, "never"), (3, -1.0, True)],
)
@pytest.mark.parametrize("room", [{}, {"num_blocks": 13, "block_size": 4, "chunk": 70, "overlap": True}], ids=str)
def test_beams_are_those_of_transformers(
    folder: Path, reference: Any, room: dict[str, Any], width: int, length_penalty: float, early_stopping: Any
) -> None:
    engine = build_engine(folder, **room)
    for seed in range(2):
        prompt = torch.randint(60, VOCAB_SIZE, (1, 20 + seed), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = reference.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                max_new_tokens=12,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                eos_token_id=list(STOP_IDS),
                pad_token_id=0,
            )
        params = SamplingParams(max_tokens=12, stop_token_ids=STOP_IDS)
        beams = BeamOptions(length_penalty, early_stopping)

        outputs = choices(
            engine, AddRequest(TokensInput(prompt[0].tolist()), params, width, beams=beams, request_id=seed)
        )
        trimmed = [until_stop(row) for row in expected[:, prompt.shape[1] :].tolist()]
        assert [output.token_ids for output in outputs] == trimmed
        for output in outputs:
            ended = output.token_ids[-1] in STOP_IDS
            assert output.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
            assert output.stop_token_id == (output.token_ids[-1] if ended else None)
            assert output.logprobs is None
    assert engine.scheduler.kv.pools[0].num_used == 0


def search(num_tokens: int = 10, width: int = 4, max_tokens: int = 12, **options: Any) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(20, 21))
    return AddRequest(TokensInput(list(range(num_tokens))), params, width, beams=BeamOptions(), **options, request_id=7)


def plain(add: AddRequest) -> list[list[int]]:
    """What a search has to find."""
    params, width, beams = add.sampling_params, add.num_choices, add.beams
    assert params.max_tokens is not None and beams is not None
    return plain_beam_search(
        lambda context: next_logprobs(context, width + max(width, len(params.stop_token_ids))),
        add.input.token_ids,
        width,
        params.max_tokens,
        params.stop_token_ids,
        beams,
    )


def check(fake: FakeEngine, add: AddRequest) -> None:
    """The search finds what a plain one does, and leaves nothing behind."""
    assert [output.token_ids for output in choices(fake.engine, add)] == plain(add)
    assert fake.engine.scheduler.kv.pools[0].num_used == 0
    assert not fake.engine.scheduler.requests


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_prompt_is_computed_and_counted_once(block_size: int, prefix_caching: bool, overlap: bool) -> None:
    """Every beam sent the whole prompt for every token, and each was looked up and counted."""
    fake = make_engine(num_blocks=400, block_size=block_size, prefix_caching=prefix_caching, overlap=overlap)
    add = search(num_tokens=50)
    check(fake, add)
    counters = fake.engine.scheduler.counters
    assert counters.prompt_tokens == counters.prefix_cache_queries == counters.prefill_tokens == 50
    assert fake.runner.num_computed_tokens == 50 + counters.decode_tokens
    assert counters.decode_tokens <= 4 * 11  # each beam computes one token a step, whatever is shared
    assert fake.engine.scheduler.counters.num_steps <= 12


def test_outputs_are_counted_as_the_caller_is_told() -> None:
    fake = make_engine()
    outputs = choices(fake.engine, search())
    assert fake.engine.scheduler.counters.generation_tokens == sum(len(output.token_ids) for output in outputs)
    assert {output.num_cached_tokens for output in outputs} == {0}
    assert all(output.queue_time_s is not None for output in outputs)


@pytest.mark.parametrize("count", [2, 20])
def test_log_probabilities_come_with_the_alternatives_that_were_asked_for(count: int) -> None:
    """Only as many came as the search itself looks at."""
    add = search()
    add = msgspec.structs.replace(add, sampling_params=msgspec.structs.replace(add.sampling_params, logprobs=count))
    outputs = choices(make_engine().engine, add)
    assert [output.token_ids for output in outputs] == plain(add)
    for output in outputs:
        assert output.logprobs is not None
        for i, (token_id, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            row = next_logprobs(add.input.token_ids + output.token_ids[:i], 20)
            assert (entry.top_token_ids, entry.top_logprobs) == (row.top_token_ids[:count], row.top_logprobs[:count])
            assert entry.logprob == row.top_logprobs[row.top_token_ids.index(token_id)]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"num_blocks": 8},
        {"num_blocks": 9, "max_num_seqs": 3},
        {"num_blocks": 9, "max_num_batched_tokens": 5},
        {"num_blocks": 9, "windows": (None, 5)},
    ],
    ids=str,
)
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_search_wider_than_there_is_room_ends_all_the_same(
    options: dict[str, Any], prefix_caching: bool, overlap: bool
) -> None:
    """Beams that had computed their token held their blocks, and the others waited for them."""
    check(make_engine(prefix_caching=prefix_caching, overlap=overlap, **options), search())


@pytest.mark.parametrize("runs_alone", [False, True])
def test_two_searches_share_what_there_is(runs_alone: bool) -> None:
    fake = make_engine(num_blocks=12, max_num_seqs=5, prefix_caching=False)
    adds = [search(), search(num_tokens=9)]
    for request_id, add in enumerate(adds):
        fake.engine.add(0, msgspec.structs.replace(add, request_id=request_id), runs_alone=runs_alone)
    found = run(fake.engine)
    assert [[output.token_ids for output in found[i]] for i in range(2)] == list(map(plain, adds))


def test_searches_that_preempt_each_other_find_what_they_find_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beam that had computed its token could be preempted, and was computed again while its search went on."""
    monkeypatch.setattr(Scheduler, "_expected_growth", lambda *_: 0)  # so that blocks run out
    num_preemptions = 0
    for seed in range(100):
        draw = random.Random(seed)
        fake = make_engine(
            num_blocks=draw.randint(14, 30),
            block_size=draw.choice([1, 2, 4]),
            max_num_seqs=draw.randint(2, 8),
            max_num_batched_tokens=draw.choice([4, 9, 64]),
            prefix_caching=draw.random() < 0.5,
            overlap=draw.random() < 0.5,
        )
        adds = [search(draw.randint(1, 5), draw.choice([1, 3, 5]), draw.randint(1, 8)) for _ in range(3)]
        for request_id, add in enumerate(adds):
            priority = draw.randint(0, 1)
            fake.engine.add(0, msgspec.structs.replace(add, request_id=request_id, priority=priority))
        found = run(fake.engine)
        assert [[output.token_ids for output in found[i]] for i in range(3)] == list(map(plain, adds))
        num_preemptions += fake.engine.scheduler.counters.num_preemptions
    assert num_preemptions > 10


def test_a_neighbour_goes_on_beside_a_search() -> None:
    fake = make_engine(overlap=True)
    fake.engine.add(0, AddRequest(TokensInput([3]), SamplingParams(max_tokens=100), request_id=1))
    fake.engine.add(0, search())
    while 7 in {key.request_id for key in fake.engine.scheduler.requests}:
        num_before = fake.engine.scheduler.counters.decode_tokens
        outputs = fake.step()
        assert fake.engine.scheduler.counters.decode_tokens > num_before or fake.engine.scheduler.counters.num_steps < 2
        fake.engine.scheduler.check_integrity()
    assert {output.request_id for _, output in outputs} == {1, 7}


@pytest.mark.parametrize(
    "broken", ["weft.engine.loop.beams.Beams.advance", "weft.engine.schedule.scheduler.Scheduler.start_beside"]
)
def test_a_search_that_fails_ends_alone(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended every request of its step."""
    caplog.set_level(logging.CRITICAL)
    fake = make_engine()
    fake.engine.add(0, search(width=3))
    fake.engine.add(0, AddRequest(TokensInput([3]), SamplingParams(max_tokens=20), request_id=1))
    collect = output_collector.collect

    def broken_collect(*step: Any) -> output_collector.Outputs:
        with monkeypatch.context() as patch:
            patch.setattr(broken, Mock(side_effect=ZeroDivisionError))
            return collect(*step)

    monkeypatch.setattr("weft.engine.loop.engine.collect", broken_collect)
    outputs = run(fake.engine)
    assert [(output.index, output.message) for output in outputs[7]] == [
        (index, "the request failed: ZeroDivisionError") for index in range(3)
    ]
    assert sum(len(output.token_ids) for output in outputs[1]) == 20


@pytest.mark.parametrize("at_launch", [False, True])
def test_a_step_that_fails_ends_all_choices_of_its_search(at_launch: bool) -> None:
    fake = make_engine()
    fake.engine.add(0, search(width=3))
    for _ in range(4):
        assert not fake.step()
    fake.runner.fails_at_launch, fake.runner.fails_at_collect = at_launch, not at_launch
    outputs = fake.step()
    assert [(output.index, output.finish_reason) for _, output in outputs] == [
        (index, FinishReason.ERROR) for index in range(3)
    ]
    fake.engine.scheduler.check_integrity()
    assert not fake.engine.has_work


def test_an_abort_ends_a_search_and_that_of_one_choice_does_not() -> None:
    fake = make_engine(num_blocks=9)  # some of its beams wait
    fake.engine.add(0, search())
    for _ in range(6):
        assert not fake.step()
    fake.engine.abort(0, 7, 0)
    assert fake.engine.scheduler.requests
    fake.engine.abort(0, 7)
    assert not fake.engine.has_work
    fake.engine.scheduler.check_integrity()
    assert fake.engine.scheduler.kv.pools[0].num_used == 0


def test_the_deadline_of_a_search_that_never_ran_is_told_for_every_choice() -> None:
    fake = make_engine()
    fake.engine.add(0, search(deadline=0.0))
    assert [(output.index, output.finish_reason) for _, output in fake.step()] == [
        (index, FinishReason.TIMEOUT) for index in range(4)
    ]
    assert not fake.engine.has_work


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_choices": 33}, "num_choices must be at most 32 with beams, got 33"),
        ({"sampling_params": SamplingParams(max_tokens=0)}, "max_tokens must be at least 1 with beams, got 0"),
        ({"guidance": Guidance(grammar="start: /a/")}, "neither a grammar nor a budget"),
        ({"guidance": Guidance(reasoning_budget=ReasoningBudget(1, 2))}, "neither a grammar nor a budget"),
    ],
)
def test_what_no_search_can_do_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RejectedError, match=message):
        make_engine().engine.add(0, msgspec.structs.replace(search(), **changes))
