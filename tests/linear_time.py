"""Whether work grows with its input alone, told without a bound in seconds, which no two machines have in common."""

import time
from collections.abc import Callable


def assert_linear(work: Callable[[int], object], size: int) -> None:
    """Four times the input may take eight times as long, where the square takes sixteen; the best of a few counts."""
    ratios = []
    for _ in range(5):
        ratios.append(_seconds(work, size) / _seconds(work, size // 4))
        if ratios[-1] < 8:
            return
    raise AssertionError(f"four times the input took {min(ratios):.1f} times as long")


def _seconds(work: Callable[[int], object], size: int) -> float:
    began = time.process_time()
    work(size)
    return time.process_time() - began
