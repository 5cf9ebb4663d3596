"""The front end's benchmark measures what it says, with a light load that any machine carries."""

import numpy as np
import pytest

from benchmarks import front_end
from benchmarks.front_end import BODIES, Load, added_latencies, measure


@pytest.mark.parametrize("path", BODIES)
def test_every_token_that_is_offered_is_counted_and_was_on_its_way_for_some_time(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_end, "START_S", 300.0)
    assert any(is_all_counted(path) for _ in range(5))  # since a machine may be busy at either end of the window


def is_all_counted(path: str) -> bool:
    seen = measure(path, Load(num_streams=4, rate=50, num_output_tokens=20), window_s=1.0)
    if not (seen.num_tokens and seen.num_offered):
        return False
    assert seen.latencies.min() > 0
    assert 0 <= seen.server_cpu_s < seen.window_s * 2
    # Equal, but for what was on its way; an event has one token, but for those that came at once.
    return 0.5 < seen.num_tokens / seen.num_offered < 2 and seen.num_events > seen.num_tokens / 2


class Table:
    """Steps at 1, 2, 3 .. s; request 0 begins with the first of them, request 1 with the third."""

    times = np.arange(1.0, 10.0)
    first_steps = np.array([0, 2])


def test_tokens_that_arrive_together_were_on_their_way_for_different_times() -> None:
    arrivals = [(0, 0, 1, 1.5), (1, 0, 0, 3.0), (0, 1, 3, 4.5), (1, 0, 2, 4.75)]
    assert added_latencies(arrivals, Table()).tolist() == [0.5, 2.5, 1.5, 0.5, 1.75, 0.75]  # type: ignore[arg-type]
