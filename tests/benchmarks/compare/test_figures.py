import pytest

from benchmarks.compare.figures import figures
from benchmarks.compare.load import LoadError, Stream


def stream(sent_at: float, times: list[float], num_tokens: int) -> Stream:
    result = Stream(sent_at)
    result.parser.event_times += times
    result.parser.num_output_tokens = num_tokens
    return result


def test_figures_of_two_streams() -> None:
    """Three tokens each; of the first stream two came in one event."""
    result = figures([stream(10.0, [10.5, 11.5], 3), stream(10.25, [10.5, 10.75, 12.25], 3)], 3)
    assert result.ttft_ms == pytest.approx(375)
    assert result.tpot_ms == pytest.approx((500 + 875) / 2)
    assert result.itl_p50_ms == pytest.approx(1000)
    assert result.itl_p99_ms == pytest.approx(1490)
    assert (result.duration_s, result.num_output_tokens) == (2.25, 6)
    assert result.output_tokens_per_s == pytest.approx(6 / 2.25)


def test_streams_that_are_not_whole_are_no_figures() -> None:
    with pytest.raises(LoadError, match="made 2 tokens instead of 3"):
        figures([stream(0.0, [1.0, 2.0], 2)], 3)
    with pytest.raises(LoadError, match="3 tokens came in 1 events"):
        figures([stream(0.0, [1.0], 3)], 3)
