from random import Random

from weft.engine.schedule.step_cost import END_OF_BURST, MAX_DELAY, MAX_DELAY_S, PromptBurst

STEP_S = 0.005


def running(num_streams: int) -> PromptBurst:
    """Streams that have run for a while without prompts."""
    burst = PromptBurst()
    assert not burst.goes_first(num_streams, 0, STEP_S, 1.0 - STEP_S)
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


def test_streams_are_delayed_by_a_bounded_time_and_then_left_alone_for_as_long() -> None:
    burst, now_s = running(8), 1.0
    num_steps = 0
    while burst.goes_first(8, 100, STEP_S, now_s):
        num_steps += 1
        now_s += 0.1
    delay_s = num_steps * (0.1 - STEP_S)
    assert MAX_DELAY * STEP_S < delay_s <= MAX_DELAY * STEP_S + 0.1 < MAX_DELAY_S + 0.1
    num_steps = 1
    while not burst.goes_first(8, 100, STEP_S, now_s):
        num_steps += 1
        now_s += STEP_S
    assert abs(num_steps * STEP_S - delay_s) <= 2 * STEP_S


def test_slow_streams_are_delayed_by_half_a_second_and_not_by_64_of_their_steps() -> None:
    burst, step_s, now_s = PromptBurst(), 0.3, 1.0
    assert not burst.goes_first(8, 0, step_s, now_s - step_s)
    delays_s = []
    while burst.goes_first(8, 100, step_s, now_s):
        delays_s.append(0.2)
        now_s += step_s + 0.2
    assert MAX_DELAY_S < sum(delays_s) <= MAX_DELAY_S + 0.2


def test_a_burst_that_has_used_half_of_its_time_is_not_for_its_last_prompts() -> None:
    """They would let nearly all streams pause once more, for few that wait."""
    for step_s, goes_on in ((0.2, True), (0.3, False)):
        burst = running(8)
        assert burst.goes_first(8, 8, 0.08, 1.0)
        assert burst.goes_first(8, 7, 0.08, 1.0 + 0.08 + step_s) is goes_on


def test_steps_that_take_no_longer_than_those_of_the_streams_delay_nobody() -> None:
    burst = running(8)
    assert all(burst.goes_first(8, 100, STEP_S, 1.0 + step * STEP_S) for step in range(int(3 * MAX_DELAY)))


def test_who_has_just_joined_has_not_waited() -> None:
    burst, now_s = running(8), 1.0
    for num_streams in range(8, 200, 8):  # each step takes the streams before it a part of what they may wait
        assert burst.goes_first(num_streams, 500, STEP_S, now_s)
        now_s += 0.3 * MAX_DELAY * STEP_S * 8 / num_streams


def test_streams_that_come_and_go_do_not_let_the_others_wait_without_end() -> None:
    burst, now_s, num_first = running(8), 1.0, 0
    while burst.goes_first(8 if num_first % 2 else 72, 500, STEP_S, now_s):
        num_first += 1
        now_s += 0.1
        assert num_first < 30 * MAX_DELAY


def test_whatever_comes_a_stream_that_was_there_first_waits_for_a_bounded_time() -> None:
    random = Random(7)
    for _ in range(200):
        burst, now_s, delay_s, longest_s = PromptBurst(), 0.0, 0.0, 0.0
        first = random.randint(1, 50)
        for _ in range(300):
            goes_first = burst.goes_first(random.randint(first, 2 * first), random.randint(0, 100), STEP_S, now_s)
            step_s = random.uniform(STEP_S, 0.5) if goes_first else STEP_S
            delay_s = delay_s + step_s - STEP_S if goes_first else 0.0
            longest_s = max(longest_s, delay_s)
            now_s += step_s
        assert longest_s <= 2 * (MAX_DELAY * STEP_S + 0.5), "twice: half of the streams may have joined since"
