"""How many tokens requests with common prefixes compute, over a fake model whose output tells its whole history."""

import random

import pytest

from tests.engine.fake_runner import FakeEngine, make_engine, next_id
from tests.engine.requests_for_tests import add_request, request
from weft.engine.cache.prefixes import is_stop, next_stop

GENERATOR = random.Random(0)
PREFIX = [GENERATOR.randrange(50) for _ in range(1000)]
NUM_OUTPUT_TOKENS = 4


def engine_with_states(**options: object) -> FakeEngine:
    defaults: dict[str, object] = {"num_blocks": 2000, "block_size": 16, "max_num_batched_tokens": 4096}
    sizes: dict[str, object] = {"max_model_len": 2000, "num_kept_states": 16, "least_stop": 256}
    return make_engine(**(defaults | sizes | options))  # type: ignore[arg-type]


def prompt_of(number: int) -> list[int]:
    return [*PREFIX, *[number] * (30 + number)]


def answer(prompt: list[int], num_tokens: int = NUM_OUTPUT_TOKENS) -> list[int]:
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_id(context, 0.0, 0.0))
    return context[len(prompt) :]


def run(fake: FakeEngine, prompts: list[list[int]], **params: object) -> int:
    """Run these prompts together and check their answers; returns how many tokens of prompts were computed."""
    before, results = fake.runner.num_computed_tokens, {number: list[int]() for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        fake.engine.add(
            0,
            add_request(prompt, number, max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, **params),  # type: ignore
        )
    while fake.engine.has_work:
        for _, output in fake.step():
            results[output.request_id] += output.token_ids
        fake.engine.scheduler.check_integrity()
    assert list(results.values()) == [answer(prompt) for prompt in prompts]
    return fake.runner.num_computed_tokens - before - (NUM_OUTPUT_TOKENS - 1) * len(prompts)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows", [(None,), ()])
def test_streams_that_arrive_together_compute_a_common_prefix_once(
    overlap: bool, windows: tuple[int | None, ...]
) -> None:
    """All but the last 8 tokens of 1,000, which do not fill a block. With and without layers that attend."""
    prompts = [prompt_of(number) for number in range(8)]
    assert run(engine_with_states(overlap=overlap, windows=windows), prompts) == 992 + sum(
        len(prompt) - 992 for prompt in prompts
    )


def test_streams_that_come_one_by_one_find_half_of_a_prefix_then_all_of_it() -> None:
    fake = engine_with_states()
    computed = [run(fake, [prompt_of(number)]) for number in range(4)]
    assert computed == [1030, 1031 - 512, 1032 - 992, 1033 - 992]


def test_the_next_turn_of_a_chat_begins_behind_the_last_prompt() -> None:
    fake, chat = engine_with_states(), list(PREFIX)
    assert run(fake, [chat]) == 1000
    for _ in range(3):
        num_before = len(chat)
        chat += [*answer(chat), *([7] * 300)]
        assert run(fake, [chat]) == len(chat) - (num_before - 1) // 16 * 16


def test_the_states_used_last_are_kept() -> None:
    fake = engine_with_states(num_kept_states=3, max_num_seqs=1)
    assert run(fake, [PREFIX]) == 1000
    other = [number % 50 for number in range(600)]
    assert run(fake, [other]) == 600  # keeps three of its own
    assert run(fake, [other]) == 600 - 592
    assert run(fake, [PREFIX]) == 1000


def test_a_request_goes_on_from_a_kept_state_after_it_was_preempted() -> None:
    fake = engine_with_states(max_num_batched_tokens=300)
    fake.engine.add(0, add_request(PREFIX, 0, max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0))
    while fake.runner.num_computed_tokens < 1000:
        fake.step()
    (running,) = fake.engine.scheduler.running
    fake.engine.scheduler._preempt(running)
    output: list[int] = list(running.token_ids[1000:])
    while fake.engine.has_work:
        output += [token_id for _, part in fake.step() for token_id in part.token_ids]
    assert output == answer(PREFIX)
    assert fake.runner.num_computed_tokens == 1000 + (1001 - 992) + NUM_OUTPUT_TOKENS - 2


def test_stops_are_powers_of_two_of_blocks_and_what_is_asked_for() -> None:
    r = request([1] * 5000)
    r.state_stops = {48, 4992}
    stops, position = [], 0
    while position < 5000:
        position = next_stop(r, position, 24, 256)
        stops.append(position)
    assert stops == [48, 384, 768, 1536, 3072, 4992, 6144]
    assert [position for position in range(24, 6145, 24) if is_stop(r, position, 24, 256)] == stops
