import pytest

from weft.engine.drafts import FIRST_PAUSE, LONGEST_PAUSE, DraftPause


def fail(pause: DraftPause) -> int:
    """How many steps the pause after a failure has."""
    pause.begin()
    number = 0
    while pause.is_on():
        number += 1
    return number


def test_each_failure_makes_the_next_pause_longer_up_to_a_bound() -> None:
    pause = DraftPause("a test")
    lengths = [fail(pause) for _ in range(10)]
    assert lengths == [FIRST_PAUSE << i for i in range(8)] + [LONGEST_PAUSE] * 2


@pytest.mark.parametrize(("num_good", "length"), [(0, 256), (127, 256), (128, 128), (128 + 64, 64), (10_000, 64)])
def test_as_many_good_steps_halve_it_again(num_good: int, length: int) -> None:
    """Failures days apart made the pauses as long as those in a row."""
    pause = DraftPause("a test")
    fail(pause)
    fail(pause)
    for _ in range(num_good):
        pause.observe_success()
    assert fail(pause) == length
