"""Checks that work grows linearly, without a bound in seconds, which would depend on the machine."""

import gc
import time
from collections.abc import Callable


def assert_linear(work: Callable[[int], object], size: int) -> None:
    """Allow eight times the time for four times the input; quadratic work takes sixteen. The best try counts."""
    ratios = []
    gc.collect()
    gc.disable()  # a collection takes as long as the whole process has objects, and comes with the larger input alone
    try:
        for _ in range(5):
            ratios.append(_seconds(work, size) / _seconds(work, size // 4))
            if ratios[-1] < 8:
                return
    finally:
        gc.enable()
    raise AssertionError(f"four times the input took {min(ratios):.1f} times as long")


def _seconds(work: Callable[[int], object], size: int) -> float:
    began = time.process_time()
    work(size)
    return time.process_time() - began
