from pathlib import Path

import pytest
import torch

from engine.native.memory import allocate


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
