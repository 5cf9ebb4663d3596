"""The front end's benchmark measures what it says, with a light load that any machine carries."""

import numpy as np
import pytest

from benchmarks.front_end import BODIES, Load, added_latencies, measure


@pytest.mark.parametrize("path", BODIES)
def test_every_token_that_is_offered_is_counted_and_was_on_its_way_for_some_time(path: str) -> None:
    seen = measure(path, Load(num_streams=4, rate=50, num_output_tokens=20), window_s=1.0)
    assert 0.5 < seen.num_tokens / seen.num_offered < 2  # equal, but for what was on its way at either end
    assert seen.latencies.min() > 0
    assert seen.num_events > seen.num_tokens / 2
    assert 0 < seen.server_cpu_s < seen.window_s * 2


class Table:
    """Steps at 1, 2, 3 .. s; request 0 begins with the first of them, request 1 with the third."""

    times = np.arange(1.0, 10.0)
    first_steps = np.array([0, 2])


def test_tokens_that_arrive_together_were_on_their_way_for_different_times() -> None:
    arrivals = [(0, 0, 1, 1.5), (1, 0, 0, 3.0), (0, 1, 3, 4.5), (1, 0, 2, 4.75)]
    assert added_latencies(arrivals, Table()).tolist() == [0.5, 2.5, 1.5, 0.5, 1.75, 0.75]  # type: ignore[arg-type]
