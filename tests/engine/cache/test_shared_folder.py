"""Two engines with one folder: one computes prompts and writes them, the other loads them and generates."""

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.engine.guidance.demo import DEMO_MODEL
from tests.engine.requests_for_tests import add_request
from weft.engine.cache import offload as open_tier
from weft.engine.cache import tier as shared_tier
from weft.engine.cache.block_bytes import BlockBytes
from weft.engine.config import resolve
from weft.engine.describe.config import load_model_config
from weft.engine.loop.engine import Engine
from weft.engine.process import StoredPrompts
from weft.engine.start import startup
from weft.engine.start.startup import Started, start
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import CachePolicy, EngineOptions

BLOCK_SIZE = 16
NUM_BLOCKS = 10
MAX_TOKENS = 8


def prompt(number: int) -> list[int]:
    generator = random.Random(number)
    return [generator.randrange(4, 90) for _ in range(NUM_BLOCKS * BLOCK_SIZE + 3)]


class Running:
    """An engine, and what holds back its outputs."""

    def __init__(self, started: Started, role: str) -> None:
        self.engine: Engine[Any] = started.engine
        self.kv = self.engine.scheduler.kv
        self.counters = self.engine.scheduler.counters
        self.tier = started.tier
        self.stored = StoredPrompts(self.kv, is_every=role == "prefill")

    def complete(self, number: int, max_tokens: int = MAX_TOKENS, *, is_stored: bool = False) -> list[int]:
        add = add_request(prompt(number), 0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.engine.add(0, msgspec.structs.replace(add, caching=CachePolicy(is_stored=is_stored)))
        ids: list[int] = []
        deadline = time.monotonic() + 60
        while self.engine.has_work or self.stored:
            assert time.monotonic() < deadline
            outputs, steps = (self.engine.step(), self.engine.ended_steps) if self.engine.has_work else ([], [])
            for _, output in self.stored.hold(steps, outputs):
                assert output.message is None
                ids += output.token_ids
            self.engine.scheduler.check_integrity()
        return ids


Build = Callable[..., Running]


@pytest.fixture(params=["demo", "qwen3-windows"])
def build(request: pytest.FixtureRequest, checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> Iterator[Build]:
    """Starts an engine of a role, with native kernels, or with windows in two groups; all have one folder."""
    is_demo = request.param == "demo"
    folder = DEMO_MODEL if is_demo else checkpoint_folder(request.param)
    opened: list[Running] = []

    def start_one(role: str, **changes: object) -> Running:
        options = EngineOptions(
            model=str(folder),
            device="cpu",
            dtype="bfloat16" if is_demo else "float32",
            max_model_len=12 * BLOCK_SIZE,
            max_num_seqs=2,
            block_size=BLOCK_SIZE,
            kv_offload_dir=str(tmp_path / "kv"),
            kv_cache_memory=4 << 20,
        )
        if role == "alone":
            changes |= {"kv_offload_dir": None}
        else:
            changes |= {"kv_role": role}
        opened.append(Running(start(msgspec.structs.replace(options, **changes), "epoch"), role))
        return opened[-1]

    yield start_one
    for running in opened:
        if running.tier is not None:
            running.tier.close()


def files_of(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kv").rglob("*.kv"), key=lambda path: path.stat().st_mtime_ns)


def test_one_computes_and_the_other_loads(build: Build, tmp_path: Path) -> None:
    expected = build("alone").complete(1)
    prefill, decode = build("prefill"), build("decode")
    assert prefill.complete(1, max_tokens=1) == expected[:1]
    assert len(files_of(tmp_path)) >= NUM_BLOCKS, "all are there before the first output"
    assert decode.complete(1) == expected
    assert decode.counters.kv_offload_disk_loads >= NUM_BLOCKS
    assert decode.counters.prefill_tokens == len(prompt(1)) - NUM_BLOCKS * BLOCK_SIZE
    assert prefill.counters.kv_offload_faults == decode.counters.kv_offload_faults == 0


def test_a_request_may_ask_for_it(build: Build, tmp_path: Path) -> None:
    both = build("both")
    both.complete(1)
    assert not files_of(tmp_path)
    both.complete(1, is_stored=True)
    assert len(files_of(tmp_path)) >= NUM_BLOCKS, "also what was cached already"


@pytest.mark.parametrize("build", ["demo"], indirect=True)
def test_what_others_removed_or_damaged_is_computed_and_written_again(build: Build, tmp_path: Path) -> None:
    expected = {number: build("alone").complete(number) for number in (1, 2)}
    prefill = build("prefill")
    for number in (1, 2):
        prefill.complete(number, max_tokens=1)
    removed, damaged = files_of(tmp_path)[6], files_of(tmp_path)[-4]
    removed.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    decode = build("decode")
    assert {number: decode.complete(number) for number in (1, 2)} == expected
    assert 0 < decode.counters.prefix_cache_hits < 2 * NUM_BLOCKS * BLOCK_SIZE
    assert decode.counters.kv_offload_faults > 0 and decode.tier is not None
    decode.tier.flush().result(60)
    assert not damaged.exists()
    for number in (1, 2):
        prefill.complete(number, max_tokens=1)
    assert removed.exists() and damaged.exists()


def test_what_cannot_be_written_delays_no_answer_for_ever(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = build("alone").complete(1)
    monkeypatch.setattr(shared_tier, "_STORE_S", 0.2)
    prefill = build("prefill")
    assert prefill.tier is not None
    monkeypatch.setattr(prefill.tier, "has_room", lambda group: False)
    assert prefill.complete(1) == expected
    assert not files_of(tmp_path)
    offload = prefill.kv.offload
    assert offload._slow is not None and offload._slow.result(60) is None and offload.is_stuck
    offload._rests_until_s = 0.0
    assert not offload.is_stuck
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "kv")
    assert prefill.complete(2)
    assert prefill.counters.kv_offload_faults > 0


def test_a_folder_that_hangs_delays_one_answer_alone(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt waited for its own look-up, and they piled up."""
    expected = [build("alone").complete(number) for number in (1, 2)]
    monkeypatch.setattr(shared_tier, "_SOUGHT_S", 0.1)
    decode, hung = build("decode"), threading.Event()
    tier, num_looks = decode.tier, [0]
    assert tier is not None

    def hang(hashes: list[bytes]) -> None:
        num_looks[0] += 1
        hung.wait(60)

    monkeypatch.setattr(tier, "_seek", hang)
    assert [decode.complete(number) for number in (1, 2)] == expected
    assert num_looks == [1] and tier._seeker._work_queue.empty()
    hung.set()


@pytest.mark.parametrize("build", ["demo"], indirect=True)
def test_another_layout_or_precision_finds_nothing(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    build("prefill").complete(1, max_tokens=1)
    precisions = {"dtype": "float32"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}
    for changes in ({"block_size": 2 * BLOCK_SIZE}, *precisions):
        other = build("decode", **changes)
        other.complete(1)
        assert other.counters.kv_offload_disk_loads == 0, changes
    monkeypatch.setattr(startup, "weights_note", lambda *_: "stored as AWQ and kept in bfloat16")
    other = build("decode")
    other.complete(1)
    assert other.counters.kv_offload_disk_loads == 0, "a quantized checkpoint"


def test_a_role_needs_a_folder() -> None:
    """`weft plan` did not say it, and `weft serve` only once it had loaded the model."""
    with pytest.raises(ModelError, match="kv_role both needs kv_offload_dir"):
        resolve(EngineOptions(model=str(DEMO_MODEL), device="cpu", kv_role="both"), load_model_config(DEMO_MODEL))


def test_folders_of_other_models_are_removed_once_nobody_has_used_them_for_a_week(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that an engine had written to for longer than a week was removed as soon as that ended."""
    monkeypatch.setenv("HOME", str(tmp_path))
    root, long_ago = tmp_path / "kv", time.time() - open_tier._UNUSED_S - 60
    for name in ("unused", "written", "started", "no-folder-of-ours"):
        (root / name).mkdir(parents=True)
        (root / name / "lock").touch()
        for path in (root / name / "lock", root / name):
            os.utime(path, (long_ago, long_ago))
    os.utime(root / "written")
    os.utime(root / "started" / "lock")
    (root / "no-folder-of-ours" / "lock").unlink()
    os.utime(root / "no-folder-of-ours", (long_ago, long_ago))
    (root / "file").touch()
    options = EngineOptions(model=str(DEMO_MODEL), kv_offload_dir="~/kv")
    opened = open_tier.open_tier(options, BlockBytes([[torch.zeros(2, 4)]], torch.device("cpu")), [])
    assert opened is not None
    opened.tier.close()
    (own,) = (path.parent.name for path in root.glob("*/key"))
    assert {path.name for path in root.iterdir()} == {own, "file", "no-folder-of-ours", "started", "written"}


def test_engines_that_share_agree_on_what_a_model_holds(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(DEMO_MODEL, first)
    shutil.copytree(DEMO_MODEL, second)
    os.utime(second / "model.safetensors", (1, 1))

    def names(folder: Path) -> list[str]:
        return [open_tier._fingerprint(folder, [], is_shared=is_shared) for is_shared in (True, False)]

    assert names(first)[0] == names(second)[0] and names(first)[1] != names(second)[1]
    blob = tmp_path / "blobs" / ("a" * 64)
    blob.parent.mkdir()
    (first / "model.safetensors").rename(blob)
    (first / "model.safetensors").symlink_to(blob)
    assert open_tier._content(first / "model.safetensors") == "a" * 64
    content = bytearray((second / "model.safetensors").read_bytes())
    content[-1] ^= 1
    before = names(second)[0]
    (second / "model.safetensors").write_bytes(content)
    assert names(second)[0] != before
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"weights")
    config = json.loads((second / "config.json").read_text())
    found = []
    for path, content in (
        (weights, b"weights"),
        (tmp_path / "moved" / weights.name, b"weights"),
        (weights, b"changed"),
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        places = {"quant_method": "gguf", "files": [str(path)], "versions": [str(path.stat().st_mtime_ns)]}
        (second / "config.json").write_text(json.dumps(config | {"quantization_config": places}))
        found.append(names(second)[0])
    assert found[0] == found[1] != found[2]
