"""What a router makes of the events is what the cache holds; `SchedulerMachine` checks the same under any traffic."""

import pytest

from tests.engine.paged import paged_specs
from tests.engine.requests_for_tests import find_prefix, request
from weft.engine.cache.events import BlockEvents, BlockRemoved, BlockStored, Event, RecordingCache
from weft.engine.cache.manager import KVCacheManager
from weft.engine.request import Request
from weft.engine.wire.options import Adapter

PROMPT = list(range(10))


class Router:
    """Learns from events alone which prefixes of whole blocks are cached."""

    def __init__(self) -> None:
        self.prefixes: dict[int, tuple[int, ...]] = {}
        self.cached: set[int] = set()

    def learn(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                parent = event.parent_block_hash
                for index, name in enumerate(event.block_hashes):
                    assert name not in self.cached
                    start = index * event.block_size
                    prefix = () if parent is None else self.prefixes[parent]
                    prefix += tuple(event.token_ids[start : start + event.block_size])
                    assert self.prefixes.setdefault(name, prefix) == prefix
                    self.cached.add(name)
                    parent = name
            elif isinstance(event, BlockRemoved):
                self.cached.difference_update(event.block_hashes)

    def check(self, kv: KVCacheManager, salted: set[bytes], *, is_late: bool = False) -> None:
        """Compare with the index; it may have more while loaded blocks are not recorded yet (is_late)."""
        assert isinstance(kv, RecordingCache)
        if (events := kv.events) is None:
            return
        self.learn(events.take())
        indexed = {int.from_bytes(h[-8:], "big") for h in events._pool._index if h not in salted}
        assert self.cached <= indexed if is_late else self.cached == indexed


def manager(num_blocks: int, *windows: int | None) -> tuple[RecordingCache, BlockEvents]:
    kv = RecordingCache(num_blocks, 4, paged_specs(*(windows or (None,))))
    assert kv.events is not None
    return kv, kv.events


def compute(kv: KVCacheManager, prompt: list[int], salt: str = "", adapter: Adapter | None = None) -> Request:
    r = request(prompt, cache_seed=kv.hashes.seed(salt, adapter))
    r.adapter = adapter
    num_cached = find_prefix(kv, r)
    assert kv.admit(r, num_cached, r.num_tokens - num_cached)
    r.num_computed_tokens = r.num_tokens
    kv.index_computed_blocks(r)
    return r


def test_blocks_of_an_adapter_have_its_name_and_salted_ones_are_nobodys_business() -> None:
    kv, events = manager(20)
    lora = Adapter("lora", "/lora", "0")
    compute(kv, PROMPT)
    compute(kv, PROMPT, adapter=lora)
    compute(kv, PROMPT, "salt", lora)
    plain, adapted = events.take()
    assert isinstance(plain, BlockStored) and isinstance(adapted, BlockStored)
    assert (plain.lora_name, adapted.lora_name) == (None, "lora")
    assert plain.token_ids == adapted.token_ids and not {*plain.block_hashes} & {*adapted.block_hashes}


def test_blocks_that_follow_each_other_are_one_event_and_others_hang_on_their_parent() -> None:
    kv, events = manager(20)
    compute(kv, PROMPT)
    compute(kv, [*PROMPT[:4], 50, 51, 52, 53])
    first, second = events.take()
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert (first.parent_block_hash, first.token_ids) == (None, PROMPT[:8])
    assert (second.parent_block_hash, second.token_ids) == (first.block_hashes[0], [50, 51, 52, 53])
    assert events.take() == []


def test_evicted_blocks_are_removed_and_may_come_back() -> None:
    kv, events = manager(4)
    kv.free(compute(kv, PROMPT))
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    kv.free(compute(kv, [99] * 5))
    assert [type(event) for event in events.take()] == [BlockRemoved, BlockStored]
    kv.free(compute(kv, PROMPT))
    assert stored.block_hashes[-1:] in [e.block_hashes for e in events.take() if isinstance(e, BlockStored)]


def test_what_has_a_salt_is_told_to_nobody() -> None:
    kv, events = manager(4)
    kv.free(compute(kv, PROMPT, "secret"))
    assert events.take() == []
    compute(kv, [99] * 10)
    assert all(isinstance(event, BlockStored) for event in events.take())


@pytest.mark.parametrize("windows", [(4, None), (None, 4)])
def test_of_several_groups_the_one_that_sees_all_is_told_of(windows: tuple[int | None, ...]) -> None:
    kv, events = manager(20, *windows)
    assert events._pool is kv.pools[windows.index(None)]


def test_without_a_prefix_cache_nothing_is_recorded() -> None:
    assert RecordingCache(4, 4, paged_specs(None), prefix_caching=False).events is None


def test_loaded_blocks_are_told_of_once_a_request_has_them() -> None:
    kv, events = manager(20)
    r = request(PROMPT, cache_seed=kv.hashes.seed("", None))
    kv.hash_blocks(r)
    blocks = kv.pools[0].allocate(2) or []
    for block, block_hash in zip(blocks, r.block_hashes, strict=True):  # as after a load
        kv.pools[0].index(block, block_hash)
        kv.pools[0].free(block)
    assert events.take() == []
    compute(kv, PROMPT)
    (stored,) = events.take()
    assert isinstance(stored, BlockStored) and stored.token_ids == PROMPT[:8]
