import pytest

from weft.engine.drafts import MAX_NUM_DRAFTS, Pace, best_num_drafts


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("price", [0.02, 0.1, 0.5, 1.0])
def test_the_best_length_is_the_best_of_all(rate: float, price: float) -> None:
    speeds = [sum(rate**i for i in range(n + 1)) / (1 + n * price) for n in range(MAX_NUM_DRAFTS + 1)]
    assert speeds[best_num_drafts(rate, price)] == pytest.approx(max(speeds))


def test_what_is_not_accepted_more_often_than_it_costs_is_not_drafted() -> None:
    assert best_num_drafts(0.3, 0.3) == 0
    assert best_num_drafts(0.3, 0.29) > 0
    assert best_num_drafts(1.0, 0.99) == MAX_NUM_DRAFTS


def test_drafts_grow_with_success_and_shrink_with_failure() -> None:
    pace = Pace()
    first = pace.num_drafts(0.1)
    pace.observe(8, 8)
    grown = pace.num_drafts(0.1)
    for _ in range(3):
        pace.observe(8, 0)
    assert pace.num_drafts(0.1) < first < grown


def test_tokens_behind_a_refused_one_count_for_nothing() -> None:
    long, short = Pace(), Pace()
    long.observe(30, 2)
    short.observe(3, 2)
    assert long.rate == short.rate


def test_a_pause_ends_when_its_reason_is_forgotten() -> None:
    pace = Pace()
    for _ in range(20):
        pace.observe(4, 0)
    waits = next(n for n in range(1000) if pace.num_drafts(0.4))
    assert 10 < waits < 200
