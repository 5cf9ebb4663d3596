import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weft.engine.cache import offload as offload_tier
from weft.engine.cache.block_bytes import BlockBytes
from weft.engine.cache.block_files import BlockFiles
from weft.engine.cache.offload import OffloadTier
from weft.engine.cache.tier import CachedBlock, LoadStoppedError

NUM_BLOCKS = 8
ROW_BYTES = 2 * 3 * 4 + 5  # a tensor of float32 and one of bytes
TIMEOUT_S = 60.0
"""Of what is waited for; only a failure takes so long."""


def hash_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Cache:
    """Blocks of one group, in two tensors."""

    def __init__(self) -> None:
        self.tensors = [torch.randn(NUM_BLOCKS, 2, 3), torch.randint(0, 9, (NUM_BLOCKS, 5), dtype=torch.uint8)]
        self.bytes = BlockBytes([self.tensors], torch.device("cpu"))

    def values(self, block: int) -> list[list[float]]:
        return [tensor[block].flatten().tolist() for tensor in self.tensors]

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()


class SlowFiles(BlockFiles):
    """Writes only after `allowed` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 20)
        self.allowed = threading.Event()
        self.fault: OSError | None = None

    def write(self, key: tuple[int, bytes], row: torch.Tensor) -> int:
        assert self.allowed.wait(TIMEOUT_S)
        if self.fault:
            raise self.fault
        return super().write(key, row)


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def files(tmp_path: Path) -> SlowFiles:
    return SlowFiles(tmp_path)


@pytest.fixture
def on_disk(cache: Cache, files: SlowFiles) -> Iterator[OffloadTier]:
    tier = OffloadTier(cache.bytes, 0, files)
    yield tier
    files.allowed.set()
    tier.close()


def wait_until_written(tier: OffloadTier) -> None:
    tier._writer.submit(lambda: None).result(TIMEOUT_S)


def test_a_block_is_found_before_and_after_it_is_written(cache: Cache, files: SlowFiles, on_disk: OffloadTier) -> None:
    expected = cache.values(3)
    on_disk.keep(CachedBlock(0, hash_of(1), 3))
    cache.clear()
    assert on_disk.has(0, hash_of(1)) and on_disk.num_disk_blocks == 0
    on_disk.load([CachedBlock(0, hash_of(1), 4)]).result(TIMEOUT_S)
    assert cache.values(4) == expected
    files.allowed.set()
    wait_until_written(on_disk)
    assert on_disk.num_disk_blocks == 1 and on_disk.num_host_blocks == 0
    on_disk.load([CachedBlock(0, hash_of(1), 5)]).result(TIMEOUT_S)
    assert cache.values(5) == expected
    counters = on_disk.counters
    assert (counters.kv_offload_kept_blocks, counters.kv_offload_host_loads, counters.kv_offload_disk_loads) == (
        1,
        1,
        1,
    )
    on_disk.keep(CachedBlock(0, hash_of(1), 5))  # is there already
    assert counters.kv_offload_kept_blocks == 1


def test_nothing_waits_for_a_slow_disk(
    cache: Cache, files: SlowFiles, on_disk: OffloadTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk._unwritten, "_max_bytes", 3 * ROW_BYTES)
    began = time.monotonic()
    for number in range(NUM_BLOCKS):
        on_disk.keep(CachedBlock(0, hash_of(number), number))
    assert time.monotonic() - began < TIMEOUT_S  # as long as a write takes here
    assert [number for number in range(NUM_BLOCKS) if on_disk.has(0, hash_of(number))] == [0, 1, 2]
    assert on_disk.counters.kv_offload_dropped_blocks == NUM_BLOCKS - 3
    files.allowed.set()
    wait_until_written(on_disk)
    on_disk.keep(CachedBlock(0, hash_of(7), 7))
    wait_until_written(on_disk)
    assert on_disk.num_disk_blocks == 4


def test_a_full_disk_is_left_alone_for_a_while(cache: Cache, files: SlowFiles, on_disk: OffloadTier) -> None:
    files.fault = OSError(28, "No space left on device")
    files.allowed.set()
    on_disk.keep(CachedBlock(0, hash_of(1), 1))
    wait_until_written(on_disk)
    files.fault = None
    on_disk.keep(CachedBlock(0, hash_of(2), 2))
    assert not on_disk.has(0, hash_of(1)) and not on_disk.has(0, hash_of(2))
    assert (on_disk.counters.kv_offload_faults, on_disk.counters.kv_offload_dropped_blocks) == (1, 1)
    on_disk._rest_until = 0.0
    on_disk.keep(CachedBlock(0, hash_of(2), 2))
    wait_until_written(on_disk)
    assert on_disk.num_disk_blocks == 1


def test_what_is_forgotten_while_it_is_written_is_never_found(
    files: SlowFiles, on_disk: OffloadTier, tmp_path: Path
) -> None:
    on_disk.keep(CachedBlock(0, hash_of(1), 1))
    on_disk.keep(CachedBlock(0, hash_of(2), 2))
    on_disk.forget(0, hash_of(1))
    assert not on_disk.has(0, hash_of(1))
    files.allowed.set()
    wait_until_written(on_disk)
    assert not on_disk.has(0, hash_of(1)) and on_disk.has(0, hash_of(2))
    on_disk.forget(0, hash_of(2))
    wait_until_written(on_disk)
    assert not on_disk.has(0, hash_of(2)) and not list(tmp_path.glob("*.kv"))


def test_what_cannot_be_read_is_an_error(cache: Cache, files: SlowFiles, on_disk: OffloadTier, tmp_path: Path) -> None:
    files.allowed.set()
    on_disk.keep(CachedBlock(0, hash_of(1), 1))
    wait_until_written(on_disk)
    (path,) = tmp_path.glob("*.kv")
    path.write_bytes(path.read_bytes()[:-1])
    on_disk.keep(CachedBlock(0, hash_of(2), 2))
    with pytest.raises(LoadStoppedError) as error:
        on_disk.load([CachedBlock(0, hash_of(2), 3), CachedBlock(0, hash_of(1), 4)]).result(TIMEOUT_S)
    assert error.value.num_loaded == 1 and "is damaged" in str(error.value.__cause__)
    assert on_disk.counters.kv_offload_faults == 1


def test_the_host_keeps_the_most_recently_used(cache: Cache) -> None:
    tier = OffloadTier(cache.bytes, 2 * ROW_BYTES, None)
    expected = cache.values(1)
    for number in (1, 2, 1, 3):
        tier.keep(CachedBlock(0, hash_of(number), number))
    assert [number for number in (1, 2, 3) if tier.has(0, hash_of(number))] == [1, 3]
    cache.clear()
    tier.load([CachedBlock(0, hash_of(1), 6)]).result(TIMEOUT_S)
    assert cache.values(6) == expected and tier.num_host_blocks == 2
    with pytest.raises(LoadStoppedError):
        tier.load([CachedBlock(0, hash_of(2), 6)]).result(TIMEOUT_S)
    tier.close()


def test_the_host_gives_no_more_than_it_was_asked_for(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows counted as long as they are, while torch pins powers of two: up to twice the memory was taken."""
    assert cache.bytes.host_bytes(0) == ROW_BYTES == 29
    with monkeypatch.context() as on_cuda:
        on_cuda.setattr(cache.bytes, "_is_cuda", True)
        assert cache.bytes.host_bytes(0) == 32
    monkeypatch.setattr(cache.bytes, "host_bytes", lambda group: 32)
    tier = OffloadTier(cache.bytes, 95, None)
    for number in (1, 2, 3, 1, 1):
        tier.keep(CachedBlock(0, hash_of(number), number))
    assert tier.num_host_blocks == 2
    tier.close()


def test_predicted_times_follow_measured_ones_and_fade(
    cache: Cache, on_disk: OffloadTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(offload_tier, "time", SimpleNamespace(monotonic=lambda: now))
    on_disk.keep(CachedBlock(0, hash_of(1), 1))
    assert on_disk.load_seconds([(0, hash_of(1))]) == 0
    on_disk._disk_rate.add(1000, 2.0)
    known = on_disk.load_seconds([(0, hash_of(9)), (0, hash_of(8))])
    assert known == pytest.approx(2 * ROW_BYTES * 2.0 / 1000, rel=1e-3)
    now += 120
    assert on_disk.load_seconds([(0, hash_of(9)), (0, hash_of(8))]) == pytest.approx(known / 4, rel=1e-3)
