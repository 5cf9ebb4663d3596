from random import Random

from engine.prompt_burst import END_OF_BURST, MAX_STANDSTILL, PromptBurst

STEP_S = 0.01


def running(num_streams: int) -> PromptBurst:
    """Streams that have run for a while without prompts."""
    burst = PromptBurst()
    assert not burst.goes_first(num_streams, 0, STEP_S, 0.0)
    return burst


def test_prompts_go_first_when_they_are_as_many_as_the_streams() -> None:
    assert not running(16).goes_first(16, 15, STEP_S, 1.0)
    assert running(16).goes_first(16, 16, STEP_S, 1.0)


def test_a_burst_goes_to_its_end_and_a_single_prompt_does_not_bring_it_back() -> None:
    burst = running(8)
    assert burst.goes_first(8, 8, STEP_S, 1.0)
    assert burst.goes_first(14, 2, STEP_S, 1.1)
    assert not burst.goes_first(16, 0, STEP_S, 1.2)
    assert not burst.goes_first(16, 2, STEP_S, 1.3)


def test_the_rest_of_the_prompts_that_came_first_belong_to_the_burst() -> None:
    assert PromptBurst().goes_first(8, 1, STEP_S, 1.0)
    assert not PromptBurst().goes_first(int(1 / END_OF_BURST) + 1, 1, STEP_S, 1.0)


def test_streams_stand_still_for_a_bounded_time_and_then_as_long_not_again() -> None:
    burst, now_s = running(8), 1.0
    while burst.goes_first(8, 100, STEP_S, now_s):
        now_s += 0.1
    assert MAX_STANDSTILL * STEP_S < now_s - 1.0 <= MAX_STANDSTILL * STEP_S + 0.1 + 1e-9
    stood_s, num_steps = now_s - 1.0, 0
    while not burst.goes_first(8, 100, STEP_S, now_s):
        num_steps += 1
        now_s += STEP_S
    assert abs(num_steps * STEP_S - stood_s) <= 2 * STEP_S


def test_who_has_just_joined_has_not_stood_still() -> None:
    burst, now_s = running(8), 1.0
    for num_streams in range(8, 200, 8):  # every step half as long as all may stand still, every step for new streams
        assert burst.goes_first(num_streams, 500, STEP_S, now_s)
        now_s += 0.5 * MAX_STANDSTILL * STEP_S * 8 / num_streams


def test_whatever_comes_no_stream_stands_still_for_longer_than_the_bound_and_one_step() -> None:
    random = Random(7)
    for _ in range(200):
        burst, now_s, stood_s, longest_s = PromptBurst(), 0.0, 0.0, 0.0
        num_streams = random.randint(1, 50)
        for _ in range(100):
            goes_first = burst.goes_first(num_streams, random.randint(0, 100), STEP_S, now_s)
            step_s = random.uniform(STEP_S, 0.5) if goes_first else STEP_S
            stood_s = stood_s + step_s if goes_first else 0.0
            longest_s = max(longest_s, stood_s)
            now_s += step_s
        assert longest_s <= MAX_STANDSTILL * STEP_S + 0.5
