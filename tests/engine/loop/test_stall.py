import pytest

from weft.engine.loop.crash_record import StallRule


@pytest.mark.parametrize(
    ("predicted_s", "allowed_s"),
    [(None, 10.0), (0.0, 120.0), (0.02, 10.0), (1.5, 15.0), (30.0, 120.0), (90.0, 180.0)],
    ids=["idle", "nothing measured", "short", "longer", "long", "longer than the setting allows"],
)
def test_a_step_may_take_ten_times_what_is_predicted_within_bounds(predicted_s: float | None, allowed_s: float) -> None:
    assert StallRule(120.0, "cpu (2 threads)").stall_time(1000.0, predicted_s) == 1000.0 + allowed_s


def test_the_setting_is_the_longest_that_is_waited_for_a_short_step() -> None:
    assert StallRule(2.0, "cpu").stall_time(1000.0, 0.02) == 1002.0
    assert StallRule(2.0, "cpu").stall_time(1000.0, None) == 1002.0


def test_a_gpu_may_have_to_compile_a_kernel_first() -> None:
    assert StallRule(120.0, "cuda (NVIDIA H100)").stall_time(1000.0, 0.02) == 1030.0


def test_an_idle_engine_gives_signs_of_life_sooner_than_it_must() -> None:
    assert StallRule(120.0, "cpu").heartbeat_s == 1.0
    assert StallRule(1.0, "cpu").heartbeat_s == 0.25


def test_nobody_is_judged_without_a_limit() -> None:
    rule = StallRule(0.0, "cpu")
    assert (rule.stall_time(1000.0, 5.0), rule.heartbeat_s) == (0.0, None)
