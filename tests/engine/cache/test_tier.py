"""The seam for offload holds: a tier in the host's memory keeps what the engine evicts and brings it back."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from tests.engine.cache.host_tier import HostTier
from tests.engine.fake_runner import VOCAB_SIZE, make_engine
from tests.engine.guidance.demo import DEMO_MODEL
from tests.engine.requests_for_tests import add_request
from weft.engine.cache import tier as tier_module
from weft.engine.cache.block_pool import BlockPool
from weft.engine.cache.offload import OffloadTier, Opened
from weft.engine.cache.tier import CachedBlock, Offload
from weft.engine.loop.engine import Engine
from weft.engine.request import RequestStatus
from weft.engine.start import startup
from weft.engine.start.startup import start
from weft.engine.wire.messages import EngineOptions, FinishReason

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 10 * BLOCK_SIZE + 3

Ids = dict[int, list[int]]
BuildEngine = Callable[..., "Engine[Any]"]


def prompt(number: int) -> list[int]:
    generator = random.Random(number)
    return [generator.randrange(4, 90) for _ in range(NUM_PROMPT_TOKENS)]


@pytest.fixture(params=["demo", "qwen3-windows"])
def build_engine(
    request: pytest.FixtureRequest, checkpoint_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> BuildEngine:
    """Starts the whole engine with room for about two of the prompts: native kernels, or windows in two groups."""
    is_demo = request.param == "demo"
    folder = DEMO_MODEL if is_demo else checkpoint_folder(request.param)

    def build(tier: HostTier | None = None, *, overlap: bool = False) -> "Engine[Any]":
        def open_offload(config: Any, plan: Any, groups: Any, caches: Any, *_: object) -> Opened | None:
            if tier is not None:
                tier.attach(caches, groups)
            return tier and Opened(cast(OffloadTier, tier), None)

        monkeypatch.setattr(startup, "_open_offload", open_offload)
        options = EngineOptions(
            model=str(folder),
            device="cpu",
            dtype="bfloat16" if is_demo else "float32",
            max_model_len=12 * BLOCK_SIZE,
            max_num_seqs=4,
            block_size=BLOCK_SIZE,
        )
        per_block = startup.start(options, "size").plan
        num_bytes = 24 * per_block.kv_cache_bytes // per_block.num_blocks
        started = start(msgspec.structs.replace(options, kv_cache_memory=num_bytes), "epoch")
        engine = started.engine
        engine._overlap = overlap
        return engine

    return build


def run(engine: "Engine[Any]", *numbers: int, between: Callable[[], None] = lambda: None) -> Ids:
    """Continue prompts at once; `between` is called after every step."""
    ids: Ids = {}
    for request_id, number in enumerate(numbers):
        engine.add(0, add_request(prompt(number), request_id, max_tokens=8, temperature=0.0, ignore_eos=True))
    while engine.has_work:
        for _, output in engine.step():
            assert output.finish_reason in (None, FinishReason.LENGTH), output.message
            ids.setdefault(numbers[output.request_id], []).extend(output.token_ids)
        engine.scheduler.check_integrity()
        between()
    return ids


def crowd_out_the_first(engine: "Engine[Any]") -> list[int]:
    """Continue three prompts one by one, of which the first is then evicted; returns its continuation."""
    first, *_ = [run(engine, number)[number] for number in (1, 2, 3)]
    return first


@pytest.mark.parametrize("overlap", [False, True])
def test_what_fell_out_is_brought_back(build_engine: BuildEngine, overlap: bool) -> None:
    """The same ids as without a tier, for fewer computed tokens."""
    rounds = [(1,), (2,), (3,), (1, 2), (3, 1), (2,)]
    plain = build_engine(overlap=overlap)
    expected = [run(plain, *numbers) for numbers in rounds]

    tier = HostTier()
    engine = build_engine(tier, overlap=overlap)
    assert [run(engine, *numbers, between=tier.work) for numbers in rounds] == expected
    assert tier.num_loaded > 20
    saved = plain.scheduler.counters.prefill_tokens - engine.scheduler.counters.prefill_tokens
    assert saved >= 4 * 10 * BLOCK_SIZE
    hits = engine.scheduler.counters.prefix_cache_hits - plain.scheduler.counters.prefix_cache_hits
    assert hits == saved


def test_no_step_waits_while_a_prefix_is_loading(build_engine: BuildEngine) -> None:
    """Who is LOADING is passed over by others, and so is who needs the same blocks; both run once they are there."""
    tier = HostTier()
    engine = build_engine(tier)
    expected = crowd_out_the_first(engine)
    for request_id in (0, 1):
        engine.add(0, add_request(prompt(1), request_id, max_tokens=8, temperature=0.0, ignore_eos=True))
    assert not engine.step()
    waiting = list(engine.scheduler.waiting)
    assert [request.status for request in waiting] == [RequestStatus.LOADING] * 2 and len(tier.pending) == 1

    engine.add(0, add_request([5, 6, 7], 9, max_tokens=6, temperature=0.0, ignore_eos=True))
    others = [output for _ in range(6) for _, output in engine.step()]
    assert {output.request_id for output in others} == {9} and others[-1].finish_reason is FinishReason.LENGTH
    assert list(engine.scheduler.waiting) == waiting and len(tier.pending) == 1
    engine.scheduler.check_integrity()

    tier.work()
    ids: Ids = {0: [], 1: []}
    while engine.has_work:
        for _, output in engine.step():
            ids[output.request_id] += output.token_ids
        engine.scheduler.check_integrity()
    assert ids == {0: expected, 1: expected}
    assert {request.num_cached_tokens for request in waiting} == {10 * BLOCK_SIZE}


def test_a_request_that_is_loading_can_be_aborted(build_engine: BuildEngine) -> None:
    tier = HostTier()
    engine = build_engine(tier)
    expected = crowd_out_the_first(engine)
    engine.add(0, add_request(prompt(1), 7))
    engine.step()
    engine.abort(0, 7)
    assert not engine.has_work and tier.pending
    engine.scheduler.check_integrity()
    while engine.prepare(1.0) == 0.0:
        pass
    pools = engine.scheduler.kv.pools
    assert engine.prepare(1.0) == 0.5 and all(pool.num_used for pool in pools), "it looks again"
    tier.work()
    assert engine.prepare(1.0) != 0.5 and not any(pool.num_used for pool in pools)
    engine.scheduler.check_integrity()
    assert run(engine, 1) == {1: expected}
    assert not tier.pending


def test_what_cannot_be_loaded_is_computed_again(build_engine: BuildEngine) -> None:
    tier = HostTier()
    engine = build_engine(tier)
    expected = crowd_out_the_first(engine)
    num_computed = engine.scheduler.counters.prefill_tokens
    assert run(engine, 1, between=tier.break_down) == {1: expected}
    assert engine.scheduler.counters.prefill_tokens > num_computed + BLOCK_SIZE
    assert tier.num_loaded == 0


def test_nothing_is_kept_of_a_failed_step(build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks may have been evicted before it was known to fail."""
    tier = HostTier()
    engine = build_engine(tier)
    run(engine, 1)
    engine.add(0, add_request(prompt(2), 0))

    def fail(launched: object) -> None:
        blocks = engine.launched_steps[0].blocks.indexed
        assert blocks
        for block in blocks:
            tier.keep(block)
        raise RuntimeError("broken")

    monkeypatch.setattr(engine._executor, "collect", fail)
    kept = set(tier.kept)
    assert [output.finish_reason for _, output in engine.step()] == [FinishReason.ERROR]
    assert set(tier.kept) == kept


def test_a_load_holds_the_whole_prefix_until_it_is_over() -> None:
    """Found blocks and new ones, so that neither is handed out meanwhile."""
    pool, tier = BlockPool(6), HostTier()
    offload = Offload(tier, (pool,))
    tier.caches = [[]]
    (found,) = pool.allocate(1) or ()
    pool.index(found, b"a")
    pool.free(found)
    tier.kept[0, b"b"] = tier.kept[0, b"c"] = []
    assert offload.begin([[b"a", b"b", b"c"]]) == b"c"
    assert pool.num_used == 3 and offload.take_done() == []
    assert pool.allocate(3) is None
    assert offload.begin([[b"b", b"d"]]) == b"b" and len(tier.pending) == 1
    tier.work()
    assert offload.take_done() == [b"b", b"c"]
    assert pool.num_used == 0 and all(pool.lookup(h) for h in (b"a", b"b", b"c"))
    pool.check_integrity()


def test_a_load_that_hangs_is_waited_for_no_longer_and_keeps_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, tier = BlockPool(6), HostTier()
    offload = Offload(tier, (pool,))
    tier.caches, tier.kept[0, b"a"], tier.kept[0, b"b"] = [[]], [], []
    assert offload.begin([[b"a"]], limit_s=1e-9) == b"a" and offload.take_done() == []
    tier.work()
    assert offload.take_done() == [b"a"]
    monkeypatch.setattr(tier_module, "_PATIENCE_S", 0.0)
    assert offload.begin([[b"b"]], limit_s=100.0) == b"b" and offload.take_done() == []
    tier.work()
    offload.take_done()
    tier.kept[0, b"c"] = tier.kept[0, b"d"] = []
    assert offload.begin([[b"c"]]) == b"c"
    assert offload.take_done() == [b"c"] and offload.take_done() == []
    assert offload.is_stuck and offload.begin([[b"d"]]) is None and pool.num_used == 1
    tier.work()
    offload.take_done()
    assert not offload.is_stuck and pool.lookup(b"c") is not None and pool.num_used == 0
    assert offload.begin([[b"d"]]) == b"d"


def test_loads_side_by_side_leave_some_blocks() -> None:
    """If all of them hung, nothing could be computed."""
    pool, tier = BlockPool(11), HostTier()
    offload = Offload(tier, (pool,))
    tier.caches, hashes = [[]], [bytes([number]) for number in range(10)]
    tier.kept = {(0, block_hash): [] for block_hash in hashes}
    assert offload.begin([hashes[:5]]) and offload.begin([hashes[5:9]])
    assert offload.begin([hashes[9:]]) is None and pool.num_used == 9
    tier.work()
    offload.take_done()
    assert offload.begin([hashes[9:]]) and len(tier.pending) == 1
    large = Offload(tier, (BlockPool(11),))
    assert large.begin([hashes]) is None and len(tier.pending) == 1
    assert large.begin([hashes[:9]]) is not None


def test_what_hangs_is_computed(build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of the network that hung held the request for ever."""
    tier = HostTier()
    engine = build_engine(tier)
    expected = crowd_out_the_first(engine)
    monkeypatch.setattr(tier_module, "_PATIENCE_S", 0.0)
    assert run(engine, 1) == {1: expected} and len(tier.pending) == 1
    tier.work()
    assert not engine.scheduler.kv.finish_loads()
    engine.scheduler.check_integrity()


def test_no_load_begins_without_room_for_it() -> None:
    pool, tier = BlockPool(4), HostTier()
    offload = Offload(tier, (pool,))
    pool.allocate(2)
    tier.kept[0, b"a"] = tier.kept[0, b"b"] = []
    assert offload.begin([[b"a", b"b"]]) is None
    assert pool.num_free == 1 and not tier.pending


def test_the_pool_tells_what_it_evicts_and_only_that() -> None:
    pool, evicted = BlockPool(4), list[CachedBlock]()
    pool.on_evict = lambda block_hash, block: evicted.append(CachedBlock(0, block_hash, block))
    blocks = pool.allocate(3) or []
    pool.index(blocks[0], b"a")
    pool.index(blocks[1], b"b")
    for block in blocks:
        pool.free(block)
    pool.unindex(blocks[1])
    pool.allocate(3)
    assert evicted == [CachedBlock(0, b"a", blocks[0])]


def test_a_load_that_a_failed_step_may_have_spoilt_is_not_trusted() -> None:
    """What it began from may be what that step should have written."""
    pool, tier = BlockPool(4), HostTier()
    offload = Offload(tier, (pool,))
    tier.caches, tier.kept[0, b"a"] = [[]], []
    assert offload.begin([[b"a"]]) == b"a"
    offload.fail_steps([CachedBlock(0, b"a", 3)])
    tier.work()
    assert offload.take_done() == [b"a"]
    assert pool.lookup(b"a") is None and pool.num_used == 0 and not tier.kept


def test_a_load_of_other_content_outlives_a_failed_step() -> None:
    pool, tier = BlockPool(4), HostTier()
    offload = Offload(tier, (pool,))
    tier.caches, tier.kept[0, b"a"], tier.kept[0, b"b"] = [[]], [], []
    offload.begin([[b"a"]])
    offload.begin([[b"b"]])
    offload.fail_steps([CachedBlock(0, b"b", 3), CachedBlock(1, b"a", 3)])
    tier.work()
    offload.take_done()
    assert pool.lookup(b"a") is not None and pool.lookup(b"b") is None and pool.num_used == 0


@pytest.mark.parametrize(
    "broken", [("keep",), ("has",), ("load",), ("load", "forget"), ("keep", "has", "load", "forget")]
)
def test_an_engine_outlives_a_tier_that_raises(
    build_engine: BuildEngine,
    broken: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it fails to keep, find or load is computed again; `run` checks the books after every step."""

    def fail(*args: object) -> None:
        raise OSError("the tier broke down")

    tier = HostTier()
    engine = build_engine(tier)
    expected = crowd_out_the_first(engine)
    for name in broken:
        monkeypatch.setattr(tier, name, fail)
    for _ in range(2):
        assert run(engine, 1, between=tier.work) == {1: expected}
        run(engine, 2, 3, between=tier.work)
    assert "the tier broke down" in caplog.text and len(caplog.messages) <= 2
    assert all(pool.num_used == 0 for pool in engine.scheduler.kv.pools)


def test_what_a_tier_cannot_forget_is_never_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be what a failed step should have written."""
    pool, tier = BlockPool(4), HostTier()
    offload = Offload(tier, (pool,))
    tier.kept[0, b"a"] = []
    monkeypatch.setattr(tier, "forget", lambda *args: 1 / 0)
    offload.fail_steps([CachedBlock(0, b"a", 3)])
    assert tier.has(0, b"a") and not offload.lookups


def test_a_cancelled_load_counts_as_failed() -> None:
    pool, tier = BlockPool(4), HostTier()
    offload = Offload(tier, (pool,))
    tier.kept[0, b"a"] = []
    offload.begin([[b"a"]])
    tier.pending[0][0].cancel()
    assert offload.take_done() == [b"a"]
    assert pool.lookup(b"a") is None and pool.num_used == 0 and not tier.kept


@pytest.mark.parametrize("num_cached", [40, 80])
@pytest.mark.parametrize("num_steps_per_load", [1, 3, 8])
def test_a_request_that_is_loading_is_not_starved(num_steps_per_load: int, num_cached: int) -> None:
    """Small requests arrive without end. It runs about when it would without a tier, and no block is loaded twice."""
    tier = HostTier()
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 96}
    engine = make_engine(num_blocks=25, block_size=4, tier=tier, **limits).engine
    generator = random.Random(0)
    request_ids = itertools.count()

    def add(prompt: list[int], max_tokens: int) -> int:
        request_id = next(request_ids)
        engine.add(0, add_request(prompt, request_id, max_tokens=max_tokens, ignore_eos=True))
        return request_id

    def draw(num_tokens: int) -> list[int]:
        return [generator.randrange(VOCAB_SIZE) for _ in range(num_tokens)]

    large = draw(81)
    for prompt in (large[: num_cached + 1], *(draw(60) for _ in range(4))):  # the others evict the large one
        add(prompt, 2)
        while engine.has_work:
            engine.step()
    for _ in range(3):
        add(draw(8), 24)
    for _ in range(3):
        engine.step()
    large_id = add(large, 2)
    for step in range(40):
        while engine.num_waiting < 4:
            add(draw(8), 24)
        ended = {output.request_id for _, output in engine.step() if output.finish_reason is not None}
        engine.scheduler.check_integrity()
        if large_id in ended:
            break
        if step % num_steps_per_load == 0:
            tier.work()
    assert large_id in ended
    assert tier.num_loaded == num_cached // 4
