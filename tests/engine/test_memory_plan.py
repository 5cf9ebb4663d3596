import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.engine import config as engine_config
from weft.engine.cache.specs import PagedKV, StateSpec, group_layers
from weft.engine.config import EngineConfig, available_memory_bytes
from weft.engine.memory_plan import MemoryPlan, estimate_activations_bytes, make_plan, num_positions
from weft.engine.wire.errors import ModelError
from weft.engine.wire.machine import MAX_CPU_CACHE_BYTES
from weft.engine.wire.messages import EngineOptions

SPECS = PagedKV(2, 8), PagedKV(2, 8, sliding_window=64), PagedKV(2, 8)
GROUPS = group_layers(SPECS)
BLOCK_BYTES = 3 * 2 * 16 * 2 * 8 * 2  # layers, K and V, tokens, heads, head size, bytes of a bfloat16

CONFIG = EngineConfig(
    options=EngineOptions(model="model"),
    model=Path("model"),
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=128,
    block_size=16,
    itl_target_s=0.25,
    overlap=False,
)


def estimated(**more: int) -> int:
    sizes = {"hidden_size": 64, "num_heads": 4, "head_dim": 16, "vocab_size": 100, "feed_forward_values": 128}
    facts = SimpleNamespace(**sizes | {"kept_values": 0, "position_values": 0, "short_context": 0} | more)
    return estimate_activations_bytes(facts, CONFIG, SPECS)  # type: ignore[arg-type]


def with_cache_memory(num_bytes: int | None) -> EngineConfig:
    return dataclasses.replace(CONFIG, options=EngineOptions(model="model", kv_cache_memory=num_bytes))


def plan(free_bytes: int, kv_cache_memory: int | None = None, **changes: object) -> MemoryPlan:
    config = dataclasses.replace(with_cache_memory(kv_cache_memory), **changes)  # type: ignore[arg-type]
    return make_plan(config, GROUPS, weights_bytes=1_234_000_000, activations_bytes=56_700, free_bytes=free_bytes)


def test_a_block_counts_in_every_group() -> None:
    assert sum(group.block_bytes(16, torch.bfloat16) for group in GROUPS) == BLOCK_BYTES == 3072


def test_a_block_of_one_byte_a_value_takes_half() -> None:
    config = dataclasses.replace(CONFIG, rounded_kv=torch.float8_e4m3fn)
    assert config.kv_cache_dtype.itemsize == 1
    assert plan(50 * BLOCK_BYTES, rounded_kv=torch.float8_e4m3fn).num_blocks == 40


def test_scales_of_int8_count() -> None:
    spec = PagedKV(2, 64)
    assert spec.bytes_per_block(16, torch.int8) == 2 * 16 * 2 * (64 + 4)


def test_the_cache_takes_its_share_of_what_is_free() -> None:
    assert plan(50 * BLOCK_BYTES).num_blocks == 20
    assert plan(50 * BLOCK_BYTES, device=torch.device("cuda")).num_blocks == 46


def test_the_cache_is_no_larger_than_all_requests_at_full_length() -> None:
    result = plan(1 << 40)
    assert (result.num_blocks, result.num_tokens) == (4 * 16 + 1, 4 * 256)
    assert result.kv_cache_bytes == 65 * BLOCK_BYTES


def test_a_cpu_cache_has_a_bound() -> None:
    assert plan(1 << 40, max_num_seqs=1 << 20).kv_cache_bytes <= MAX_CPU_CACHE_BYTES
    assert plan(1 << 40, max_num_seqs=1 << 20, device=torch.device("cuda")).kv_cache_bytes > MAX_CPU_CACHE_BYTES


def test_what_the_user_asks_for_is_taken_whole() -> None:
    assert plan(50 * BLOCK_BYTES, kv_cache_memory=30 * BLOCK_BYTES + 5).num_blocks == 30


def test_more_than_is_free_is_refused_with_both_numbers() -> None:
    with pytest.raises(ModelError, match=r"kv_cache_memory is 2\.00 GB, but only 1\.5 MB are free"):
        plan(1_500_000, kv_cache_memory=2_000_000_000)


@pytest.mark.parametrize("free_bytes", [-5, 0, BLOCK_BYTES])
def test_no_room_for_a_request_is_refused(free_bytes: int) -> None:
    with pytest.raises(ModelError, match=r"no memory is left for the KV cache: .*, a block takes 3\.07 kB"):
        plan(free_bytes)


def test_a_length_that_does_not_fit_is_lowered_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = plan(25 * BLOCK_BYTES)
    assert (result.num_blocks, result.max_model_len) == (10, 9 * 16)
    assert caplog.messages == ["max_model_len lowered from 256 to 144 tokens, which fill the KV cache of 30.7 kB"]


def test_concurrency_is_by_length_and_no_more_than_run_at_once() -> None:
    result = plan(1 << 40, max_model_len=20_000, max_num_seqs=40, kv_cache_memory=2_501 * BLOCK_BYTES)
    assert [result.num_requests(n) for n in (16, 17, 20_000)] == [2500, 1250, 2]
    assert result.concurrency() == (
        "at once      39 with 1,024 tokens each, 9 with 4,096 tokens each, 2 with 16,384 tokens each, "
        "2 with 20,000 tokens each (never more than 40 requests)"
    )
    assert plan(1 << 40, max_num_seqs=3).concurrency() == (
        "at once      3 with 256 tokens each (never more than 3 requests)"
    )


def test_the_plan_reads_well() -> None:
    assert plan(1 << 40).lines() == [
        "weights      1.23 GB",
        "activations  56.7 kB",
        "KV cache     200 kB = 65 blocks of 16 = 1,024 tokens = 4.0 requests of 256 tokens at once",
    ]


def test_cached_files_of_a_container_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights just read sat in the container's page cache, and left no memory for the KV cache."""
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 500000\nactive_file 100000\n")
    monkeypatch.setattr(engine_config, "_CGROUP", tmp_path)
    assert available_memory_bytes(torch.device("cpu")) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(torch.device("cpu")) > 600_000


@pytest.mark.parametrize(
    ("kv_cache_memory", "changes", "expected"),
    [
        (None, {}, 256),
        (None, {"max_model_len": 1 << 30}, MAX_CPU_CACHE_BYTES // BLOCK_BYTES * 16),
        (10 * BLOCK_BYTES, {}, 160),
        (2 * BLOCK_BYTES, {}, 128),
    ],
    ids=["whole context", "bound of a CPU cache", "given memory", "a measured step"],
)
def test_tables_of_positions_are_as_long_as_any_request(
    kv_cache_memory: int | None, changes: dict[str, Any], expected: int
) -> None:
    """Llama 4 Scout's took 5.4 GB, of ten million positions of which the cache holds 21,000, and were in no plan."""
    config = dataclasses.replace(with_cache_memory(kv_cache_memory), **changes)
    assert num_positions(config, SPECS) == expected
    assert plan(1 << 40, kv_cache_memory, **changes).max_model_len <= expected


def test_what_lies_beside_the_layers_counts() -> None:
    assert estimated(position_values=64) - estimated() == 256 * 64 * 2
    assert estimated(position_values=64, short_context=40) - estimated() == (256 + 40) * 64 * 2
    assert estimated(kept_values=8960) - estimated() == 128 * 8960 * 2


STATES = group_layers((StateSpec((3, 8), torch.float32),) * 2)
STATE_BYTES = 2 * 3 * 8 * 4


def plan_with_states(num_bytes: int, *, has_blocks: bool = True, max_num_seqs: int | None = None) -> MemoryPlan:
    options = EngineOptions(model="model", kv_cache_memory=num_bytes, max_num_seqs=max_num_seqs)
    groups = (*GROUPS, *STATES) if has_blocks else STATES
    sizes = {"weights_bytes": 0, "activations_bytes": 0, "free_bytes": 1 << 30}
    return make_plan(dataclasses.replace(CONFIG, options=options), groups, **sizes)


def test_states_of_requests_come_first_and_a_share_of_the_rest_keeps_others() -> None:
    """Four requests and the null slot, in two layers; a quarter of what is left holds 12 more."""
    result = plan_with_states(5 * STATE_BYTES + 4 * 12 * STATE_BYTES)
    assert (result.max_num_seqs, result.num_kept_states, result.states_bytes) == (4, 12, 17 * STATE_BYTES)
    assert result.num_blocks == 36 * STATE_BYTES // BLOCK_BYTES == 2
    assert result.kv_cache_bytes == 17 * STATE_BYTES + 2 * BLOCK_BYTES
    assert result.lines()[-1] == "states       3.26 kB of the KV cache = 4 requests and 12 for prefixes and drafts"
    alone = plan_with_states(30 * STATE_BYTES, has_blocks=False)
    assert (alone.num_kept_states, alone.num_blocks, alone.max_model_len) == (16, 65, 256)
    assert alone.kv_cache_bytes == alone.states_bytes == 21 * STATE_BYTES


def test_fewer_requests_run_at_once_if_their_states_are_large(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = plan_with_states(6 * STATE_BYTES, has_blocks=False)
    assert (result.max_num_seqs, result.num_kept_states, result.states_bytes) == (2, 3, 6 * STATE_BYTES)
    assert caplog.messages == ["at most 2 requests run at once, since the states of one take 192 B"]
    with pytest.raises(
        ModelError, match="no memory is left for the KV cache: 959 B, a block takes 0 B, the states of 4 requests 960 B"
    ):
        plan_with_states(5 * STATE_BYTES - 1, has_blocks=False, max_num_seqs=4)
