from pathlib import Path

import numpy as np
import pytest
import torch

from weft.engine.kernels.cpu.library import FirstTouch, allocate

PAGE = 2 << 20


@pytest.mark.parametrize("num_values", [1, 1000, 3_000_000])
def test_arrays_are_zero_and_can_be_written(num_values: int) -> None:
    array = allocate(num_values, torch.bfloat16)
    assert array.shape == (num_values,) and not array.any()
    array.fill_(1)
    assert array.float().sum() == num_values


def test_large_arrays_start_on_a_huge_page_and_take_no_memory_until_written() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    array = allocate(1 << 30, torch.bfloat16)
    assert array.data_ptr() % (2 << 20) == 0
    assert resident_bytes() - before < 100 << 20


def test_large_arrays_are_in_huge_pages() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("the kernel gives no huge pages")

    def huge_kilobytes() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("AnonHugePages")))

    before = huge_kilobytes()
    array = allocate(16 << 20, torch.bfloat16).fill_(1)
    assert huge_kilobytes() - before > array.nbytes // 1024 // 2


class Recorded:
    """An array of bytes that notes where it is written to."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = np.arange(num_bytes // PAGE, dtype=np.uint8)
        self.written: list[int] = []

    def __getitem__(self, offset: int) -> int:
        return int(self.bytes[offset // PAGE])

    def __setitem__(self, offset: int, value: int) -> None:
        assert offset % PAGE == 0 and value == self[offset], "what was written there is gone"
        self.written.append(offset // PAGE)


@pytest.mark.parametrize("num_arrays", [1, 5, 28])
def test_memory_is_asked_for_a_little_at_a_time_before_it_is_needed(num_arrays: int) -> None:
    touch = FirstTouch([allocate(16 * PAGE, torch.uint8) for _ in range(num_arrays)], PAGE // 16)
    arrays = [Recorded(16 * PAGE) for _ in range(num_arrays)]
    touch._arrays = arrays  # type: ignore[assignment]
    num_written = 0
    for item in range(16 * 16):
        page = item // 16
        assert all(array.written == list(range(1, len(array.written) + 1)) for array in arrays)
        assert page == 0 or all(page in array.written for array in arrays)
        touch.approach(item, 1)
        total = sum(len(array.written) for array in arrays)
        assert total - num_written <= -(-num_arrays // 8), "twice the 1/16 of a page that is written"
        num_written = total
    assert num_written == 15 * num_arrays


def test_after_a_leap_memory_is_asked_for_from_there_on() -> None:
    touch = FirstTouch([allocate(16 * PAGE, torch.uint8)], PAGE)
    array = Recorded(16 * PAGE)
    touch._arrays = [array]  # type: ignore[list-item]
    for item in (0, 6, 6, 3, 15):  # the ends of pages 0, 6, 6, 3 and 15
        touch.approach(item, 1)
    assert array.written == [1, 7]


@pytest.mark.parametrize("num_arrays", [1, 5, 28])
def test_a_long_prompt_asks_for_some_of_the_next_pages(num_arrays: int) -> None:
    touch = FirstTouch([allocate(16 * PAGE, torch.uint8) for _ in range(num_arrays)], PAGE // 16)
    arrays = [Recorded(16 * PAGE) for _ in range(num_arrays)]
    touch._arrays = arrays  # type: ignore[assignment]
    touch.approach(99, 100)
    assert sum(len(array.written) for array in arrays) == -(-num_arrays // 4)


def test_small_arrays_are_left_alone() -> None:
    touch = FirstTouch([allocate(1000, torch.uint8)], 100)
    array = Recorded(0)
    touch._arrays = [array]  # type: ignore[list-item]
    touch.approach(9, 10)
    assert array.written == []


@pytest.mark.parametrize("num_arrays", [1, 5, 28])
def test_idle_time_asks_for_memory_page_by_page_so_far_ahead_of_what_was_written(num_arrays: int) -> None:
    touch = FirstTouch([allocate(16 * PAGE, torch.uint8) for _ in range(num_arrays)], PAGE // 16)
    arrays = [Recorded(16 * PAGE) for _ in range(num_arrays)]
    touch._arrays = arrays  # type: ignore[assignment]

    def num_asked_for() -> int:
        before = sum(len(array.written) for array in arrays)
        while touch.ask_in_idle_time(5 * 16):
            assert sum(len(array.written) for array in arrays) == before + 1
            before += 1
        assert not touch.ask_in_idle_time(5 * 16)
        return before

    assert num_asked_for() == 5 * num_arrays
    assert all(array.written == [0, 1, 2, 3, 4] for array in arrays)
    touch.approach(2 * 16 + 3, 1)
    assert num_asked_for() == 8 * num_arrays, "the third page is being written to"
    touch.approach(14 * 16, 1)
    num_asked = num_asked_for()
    assert all(array.written[-1] == 15 for array in arrays), "to the end and not beyond"
    touch.approach(0, 1)
    assert num_asked_for() == num_asked
