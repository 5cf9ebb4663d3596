"""How several models divide what is free: numbers in, numbers out."""

import dataclasses
import re
from random import Random
from typing import Any

import msgspec
import pytest

from weft.engine.wire.machine import MAX_CPU_CACHE_BYTES, ModelMemory
from weft.server.settings import StartError
from weft.server.supervise.memory_shares import Shares, divide

GB = 1_000_000_000
CHAT = ModelMemory(
    device="cuda",
    free_bytes=40 * GB,
    process_bytes=GB,
    weights_bytes=8 * GB,
    activations_bytes=GB,
    least_kv_bytes=GB,
    kv_bytes=27 * GB,
)


def model(**changes: Any) -> ModelMemory:
    return msgspec.structs.replace(CHAT, **changes)


def caches(shares: Shares) -> dict[str, float]:
    return {name: share.kv_cache_memory / GB for name, share in shares.models.items()}


def test_what_is_left_is_divided_equally() -> None:
    shares = divide({"a": CHAT, "b": model(weights_bytes=6 * GB)}, {"a", "b"})
    assert caches(shares) == {"a": pytest.approx(22 * 0.92 / 2), "b": pytest.approx(22 * 0.92 / 2)}
    assert shares.models["a"].total_bytes == pytest.approx((10 + 22 * 0.46) * GB)
    assert shares.budget_bytes == {"cuda": pytest.approx((40 - 22 * 0.08) * GB)}
    assert sum(share.total_bytes for share in shares.models.values()) <= shares.budget_bytes["cuda"]


def test_what_one_cannot_use_goes_to_the_others_and_each_can_serve_a_request() -> None:
    small, long = model(weights_bytes=GB, kv_bytes=GB // 2, least_kv_bytes=GB // 4), model(least_kv_bytes=9 * GB)
    shares = divide({"chat": CHAT, "small": small, "long": long}, {"chat", "small", "long"})
    assert caches(shares) == {"chat": pytest.approx(17 * 0.92 - 0.5 - 9), "small": 0.5, "long": 9}


def test_a_cache_of_its_own_setting_is_kept_and_not_promised_twice() -> None:
    own = model(kv_bytes=10 * GB, is_kv_fixed=True)
    assert caches(divide({"chat": CHAT, "own": own}, {"chat", "own"})) == {"chat": pytest.approx(10 * 0.92), "own": 10}


def test_the_largest_on_demand_model_has_its_place_beside_the_others() -> None:
    """Smaller ones get no more cache than it, and may share its place."""
    big, small = model(weights_bytes=12 * GB), model(weights_bytes=2 * GB, kv_bytes=2 * GB)
    alone = divide({"chat": CHAT}, {"chat"})
    shares = divide({"small": small, "big": big, "chat": CHAT}, {"chat"})
    assert caches(alone) == {"chat": 27}
    assert caches(shares) == {"small": 2, "big": pytest.approx(16 * 0.46), "chat": pytest.approx(16 * 0.46)}
    used = shares.models["chat"].total_bytes + shares.models["big"].total_bytes
    assert used <= shares.budget_bytes["cuda"] < used + shares.models["small"].total_bytes


def test_no_on_demand_model_takes_more_than_the_place_made_for_one() -> None:
    largest = model(weights_bytes=10 * GB, least_kv_bytes=6 * GB)
    other = model(weights_bytes=14 * GB, least_kv_bytes=GB)
    shares = divide({"chat": CHAT, "largest": largest, "other": other}, {"chat"})
    assert shares.models["other"].total_bytes == shares.models["largest"].total_bytes
    assert shares.models["other"].kv_cache_memory < shares.models["largest"].kv_cache_memory


def test_devices_have_budgets_of_their_own_and_ranks_divide_a_cpu() -> None:
    ranks = model(device="cpu", num_sharing=2, free_bytes=64 * GB, kv_bytes=30 * GB)
    shares = divide({"chat": CHAT, "slow": ranks}, {"chat", "slow"})
    assert shares.models["chat"] == divide({"chat": CHAT}, {"chat"}).models["chat"]
    assert shares.models["slow"].kv_cache_memory == MAX_CPU_CACHE_BYTES // 2
    assert shares.models["slow"].total_bytes == 10 * GB + MAX_CPU_CACHE_BYTES
    assert set(shares.budget_bytes) == {"cpu", "cuda"}


@pytest.mark.parametrize(
    ("names", "always", "fault"),
    [
        ("huge", "huge", "huge needs 47.09 GB, 40.00 GB are free; set quantization or kv_cache_memory"),
        ("chat huge", "chat", "huge needs 47.09 GB, 40.00 GB are free; set quantization or kv_cache_memory"),
        ("chat big", "chat big", "chat and big need 42.17 GB together, 40.00 GB are free; set load: on-demand, "),
        ("big chat", "chat", "chat and big need 42.17 GB together, 40.00 GB are free; set load: on-demand, "),
    ],
)
def test_what_cannot_fit_is_refused_by_name(names: str, always: str, fault: str) -> None:
    known = {"huge": model(weights_bytes=44 * GB), "big": model(weights_bytes=28 * GB), "chat": CHAT}
    with pytest.raises(StartError, match=f"^models: {re.escape(fault)}"):
        divide({name: known[name] for name in names.split()}, set(always.split()))


def test_a_model_without_a_plan_fails_alone_unless_it_is_always_loaded() -> None:
    memories = {"chat": CHAT, "broken": ModelMemory(fault="/b: no config.json")}
    shares = divide(memories, {"chat"})
    assert dataclasses.replace(shares, faults={}) == divide({"chat": CHAT}, {"chat"})
    assert shares.faults == {"broken": "/b: no config.json"}
    with pytest.raises(StartError, match=r"^models: broken: /b: no config\.json$"):
        divide(memories, {"chat", "broken"})


@pytest.mark.parametrize("seed", range(200))
def test_nothing_is_promised_twice(seed: int) -> None:
    """Whatever the sizes: what is always loaded fits with any other model, and every cache serves a request."""
    random = Random(seed)
    device, num_models = random.choice(["cpu", "cuda"]), random.randint(1, 5)
    memories = {}
    for name in "abcde"[:num_models]:
        least = random.randint(1, 2 * GB)
        kv_bytes = random.randint(least, 20 * GB)
        sizes = {"weights_bytes": random.randint(0, 6 * GB), "least_kv_bytes": least, "kv_bytes": kv_bytes}
        memories[name] = model(device=device, is_kv_fixed=random.random() < 0.3, **sizes)
    always = [name for name in memories if random.random() < 0.5]
    try:
        shares = divide(memories, always)
    except StartError:
        return
    budget_bytes = shares.budget_bytes[device]
    assert budget_bytes <= 40 * GB
    taken = sum(shares.models[name].total_bytes for name in always)
    for name, share in shares.models.items():
        own = memories[name]
        assert share.cache_bytes == own.kv_bytes if own.is_kv_fixed else share.cache_bytes >= own.least_kv_bytes
        assert taken + share.total_bytes * (name not in always) <= budget_bytes
