"""A whole engine with `kv_offload_dir`: what falls out of its cache comes back from disk, also after a restart."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.checkpoints import write_checkpoint
from tests.engine.describe.test_state_space_families import CASES
from tests.engine.guidance.demo import DEMO_MODEL
from tests.engine.requests_for_tests import add_request
from weft.engine import config as engine_config
from weft.engine.cache.block_bytes import BlockBytes
from weft.engine.cache.manager import KVCacheManager
from weft.engine.cache.offload import OffloadTier, open_tier
from weft.engine.loop.engine import Engine
from weft.engine.start import startup
from weft.engine.start.startup import Started, start
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions

BLOCK_SIZE = 16
NUM_BLOCKS_OF_A_PROMPT = 10


def prompt(number: int) -> list[int]:
    generator = random.Random(number)
    return [generator.randrange(4, 90) for _ in range(NUM_BLOCKS_OF_A_PROMPT * BLOCK_SIZE + 3)]


def complete(started: Started, number: int) -> list[int]:
    """Continue a prompt, and wait until what it evicted is on disk."""
    engine: Engine[Any] = started.engine
    engine.add(0, add_request(prompt(number), 0, max_tokens=8, temperature=0.0, ignore_eos=True))
    ids: list[int] = []
    while engine.has_work:
        for _, output in engine.step():
            assert output.message is None
            ids += output.token_ids
    engine.scheduler.check_integrity()
    if started.tier:
        started.tier._writer.submit(lambda: None).result(60)
    return ids


Build = Callable[..., Started]


@pytest.fixture(params=["demo", "qwen3-windows", "falcon-h1"])
def build(
    request: pytest.FixtureRequest,
    checkpoint_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Build]:
    """Starts an engine with room for about two prompts: native kernels, windows in two groups, or recurrent states."""
    monkeypatch.setattr(OffloadTier, "load_seconds", lambda *_: 0.0)  # so small a model computes faster than disks read
    is_demo = request.param == "demo"
    if request.param == "falcon-h1":
        write_checkpoint(CASES[request.param], folder := tmp_path / "model")
        monkeypatch.setattr(startup, "KVCacheManager", partial(KVCacheManager, least_stop=2 * BLOCK_SIZE))
    else:
        folder = DEMO_MODEL if is_demo else checkpoint_folder(request.param)
    opened: list[Started] = []

    def start_one(is_kept: bool = True, **changes: object) -> Started:
        for started in opened:
            if started.tier:
                started.tier.close()
        opened.clear()
        options = EngineOptions(
            model=str(folder),
            device="cpu",
            dtype="bfloat16" if is_demo else "float32",
            max_model_len=12 * BLOCK_SIZE,
            max_num_seqs=2,
            block_size=BLOCK_SIZE,
        )
        plan = start(options, "size").plan
        num_bytes = 24 * (plan.kv_cache_bytes // plan.num_blocks) + plan.states_bytes
        options = msgspec.structs.replace(options, kv_cache_memory=num_bytes)
        where = str(tmp_path / "kv") if is_kept else None
        opened.append(start(msgspec.structs.replace(options, kv_offload_dir=where, **changes), "epoch"))
        return opened[-1]

    yield start_one
    start_one(is_kept=False)


def test_what_fell_out_comes_back_even_after_a_restart(build: Build, tmp_path: Path) -> None:
    order = [1, 2, 3, 4, 1, 2, 3, 4]
    plain = build(is_kept=False)
    expected = [complete(plain, number) for number in order]
    started = build()
    assert [complete(started, number) for number in order] == expected
    counters = started.engine.scheduler.counters
    assert counters.kv_offload_disk_loads + counters.kv_offload_host_loads > 2 * NUM_BLOCKS_OF_A_PROMPT
    assert counters.prefill_tokens < plain.engine.scheduler.counters.prefill_tokens
    assert counters.kv_offload_faults == counters.kv_offload_dropped_blocks == 0

    again = build()
    again.tier._writer.submit(lambda: None).result(60)  # type: ignore[union-attr]
    assert complete(again, 1) == expected[0]
    assert again.engine.scheduler.counters.prefix_cache_hits >= BLOCK_SIZE

    for path in (tmp_path / "kv").rglob("*.kv"):
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    damaged = build()
    damaged.tier._writer.submit(lambda: None).result(60)  # type: ignore[union-attr]
    assert [complete(damaged, number) for number in (1, 2, 3, 4)] == expected[:4]
    assert damaged.engine.scheduler.counters.prefix_cache_hits == 0
    assert damaged.engine.scheduler.counters.kv_offload_faults > 0


def test_what_is_computed_faster_is_not_loaded(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    started = build()
    expected = [complete(started, number) for number in (1, 2, 3, 4)]
    monkeypatch.setattr(OffloadTier, "load_seconds", lambda self, blocks: 1e9 * len(blocks))
    assert [complete(started, number) for number in (1, 2)] == expected[:2]
    counters = started.engine.scheduler.counters
    assert counters.kv_offload_disk_loads == counters.kv_offload_host_loads == 0


def test_what_is_on_disk_is_bounded(build: Build) -> None:
    started = build()
    for number in (1, 2, 3, 4):
        complete(started, number)
    num_blocks = started.tier.num_disk_blocks  # type: ignore[union-attr]
    row_bytes = started.tier._blocks.row_bytes[0]  # type: ignore[union-attr]
    bounded = build(kv_offload_disk=3 * (row_bytes + 8192))
    for number in (1, 2, 3, 4):
        complete(bounded, number)
    assert 0 < bounded.tier.num_disk_blocks < num_blocks  # type: ignore[union-attr]


def test_another_precision_finds_nothing(build: Build, tmp_path: Path) -> None:
    started = build(dtype="bfloat16")
    for number in (1, 2, 3):
        complete(started, number)
    build(dtype="float32")
    folders = list((tmp_path / "kv").iterdir())
    assert len(folders) == 2
    assert sorted(bool(list(folder.glob("*.kv"))) for folder in folders) == [False, True]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"kv_offload": 1 << 20}, "kv_offload keeps blocks in the host's memory"),
        ({"prefix_caching": False}, "keep cached prefixes, and this engine caches none"),
        ({"kv_offload_dir": "/proc/kv"}, "kv_offload_dir /proc/kv cannot be used: "),
    ],
)
def test_what_is_impossible_is_refused(tmp_path: Path, changes: dict[str, object], fault: str) -> None:
    options = EngineOptions(model=str(DEMO_MODEL), device="cpu", kv_offload_dir=str(tmp_path))
    with pytest.raises(ModelError, match=fault):
        start(msgspec.structs.replace(options, **changes), "epoch")


def test_the_host_has_room_for_what_it_is_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """More was accepted, and the operating system's out-of-memory killer came when it was used."""
    monkeypatch.setattr(engine_config, "available_memory_bytes", lambda device: 7_000_000_000)
    options = EngineOptions(model="model", kv_offload=7_000_000_000)
    engine_config._check_offload(options, torch.device("cuda"))
    more = msgspec.structs.replace(options, kv_offload=8_000_000_000)
    with pytest.raises(
        ModelError, match=r"^kv_offload must be at most 7.00 GB, the free memory of the host, got 8.00 GB$"
    ):
        engine_config._check_offload(more, torch.device("cuda"))


@pytest.mark.parametrize("name", ["kv_offload", "kv_offload_disk"])
def test_a_size_too_small_for_any_block_is_refused(tmp_path: Path, name: str) -> None:
    """32 instead of 32GiB was 32 bytes, and nothing was ever kept."""
    options = EngineOptions(model=str(DEMO_MODEL), kv_offload_dir=str(tmp_path), **{name: 32})
    blocks = BlockBytes([[torch.zeros(2, 4096)], [torch.zeros(2, 8192)]], torch.device("cpu"))
    with pytest.raises(ModelError, match=rf"^{name} must be at least 3\d\.\d kB, which a block takes, got 32 B$"):
        open_tier(options, blocks, [])
    assert list(tmp_path.iterdir()) == []


def test_two_engines_of_a_model_do_not_share_a_folder(tmp_path: Path) -> None:
    options = EngineOptions(model=str(DEMO_MODEL), device="cpu", kv_offload_dir=str(tmp_path))
    first = start(options, "epoch")
    with pytest.raises(ModelError, match="is in use by another engine of this model"):
        start(options, "epoch")
    first.tier.close()  # type: ignore[union-attr]
