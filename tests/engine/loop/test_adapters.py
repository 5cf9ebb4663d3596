"""Which adapter is in which slot: who waits for one, who leaves for it, and that nobody else waits."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.engine.fake_runner import FakeEngine, make_engine
from tests.engine.guidance.demo import guided
from tests.engine.guidance.slow_compiler import SlowCompiler
from tests.engine.loop.test_pending_grammars import faults
from tests.engine.requests_for_tests import add_request
from weft.engine.loop.grammars import PendingGrammars
from weft.engine.loop.pending import RejectedError
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import FinishReason, RejectReason
from weft.engine.wire.options import ADAPTER_S, Adapter, find_adapter


def adapter(folder: Path, name: str) -> Adapter:
    if not (folder / name).exists():
        (folder / name).mkdir()
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name / file).touch()
    return find_adapter(name, folder / name)


class AtOnce:
    """Reads the files of an adapter when it is asked to, or as long as the test says not at all."""

    def __init__(self) -> None:
        self.stuck: set[str] = set()
        self.asked: list[Future[None]] = []

    def submit(self, read: Any) -> "Future[None]":
        self.asked.append(future := Future())
        if Path(read.args[0]).name not in self.stuck:
            try:
                future.set_result(read())
            except ModelError as error:
                future.set_exception(error)
        return future


class Site:
    """An engine with slots; requests have the ids 0, 1 ... in order."""

    def __init__(self, folder: Path, max_loras: int, **options: Any) -> None:
        self.folder = folder
        self.fake: FakeEngine = make_engine(max_loras=max_loras, **options)
        self.engine = self.fake.engine
        self.files = AtOnce()
        self.engine.pending.adapters._threads = self.files  # type: ignore[assignment]
        self.num_requests = 0

    def ask(self, name: str | None, **options: Any) -> bool:
        add = add_request([3, 1, 4, 1, 5], self.num_requests, **{"max_tokens": 2} | options)
        self.num_requests += 1
        return self.engine.add(0, replace(add, adapter=name and adapter(self.folder, name)))

    @property
    def loads(self) -> list[tuple[int, str]]:
        """Slot and adapter of each load that has begun."""
        return [(slot, name) for slot, name, _ in self.fake.runner.loads]

    def end_load(self, index: int = -1, error: Exception | None = None) -> None:
        _, name, future = self.fake.runner.loads[index]
        future.set_exception(error) if error else future.set_result(adapter(self.folder, name).content)

    def step(self) -> set[int]:
        """The requests that a step brought further."""
        return {output.request_id for _, output in self.engine.step()}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, 2)


def test_who_waits_for_an_adapter_delays_nobody(site: Site) -> None:
    assert (site.ask("a"), site.ask(None), site.ask("a")) == (False, True, False)
    assert (faults(site.engine), site.loads, site.engine.num_waiting) == ({}, [(1, "a")], 3)
    assert (site.step(), site.step(), site.engine.has_work) == ({1}, {1}, True)
    assert faults(site.engine) == {}
    site.end_load()
    assert faults(site.engine) == {0: None, 2: None}
    assert site.step() == {0, 2}
    assert site.fake.runner.batches[-1].adapters.tolist() == [1, 1]  # type: ignore[union-attr]
    assert site.ask("a")  # it is in a slot
    assert len(site.loads) == site.engine.scheduler.counters.lora_loads == 1


def test_the_slot_that_was_used_least_recently_is_taken(site: Site) -> None:
    for name in ("a", "b", "a", "c", "a", "b"):
        site.ask(name)
        faults(site.engine)
        if site.fake.runner.loads and not site.fake.runner.loads[-1][2].done():
            site.end_load()
            faults(site.engine)
        while site.engine.has_work:
            site.step()
    assert site.loads == [(1, "a"), (2, "b"), (2, "c"), (2, "b")]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_slot_that_is_used_is_left_alone_until_its_requests_have_ended(tmp_path: Path, overlap: bool) -> None:
    site = Site(tmp_path, 1, overlap=overlap)
    site.ask("a", max_tokens=9)
    faults(site.engine)
    site.end_load()
    faults(site.engine)
    site.step()
    site.ask("b")
    assert (faults(site.engine), len(site.loads)) == ({}, 1)
    site.engine.abort(0, 0)  # with overlap, a step of it is still on the device
    assert bool(site.engine.launched_steps) is overlap
    assert (faults(site.engine), len(site.loads)) == ({}, 1 if overlap else 2)
    site.step()
    assert (faults(site.engine), site.loads) == ({}, [(1, "a"), (1, "b")])


def test_no_adapter_waits_for_ever_and_no_request_is_lost(tmp_path: Path) -> None:
    """Requests for "a" come all the time; without draining, "b" and "c" would never get the one slot."""
    site = Site(tmp_path, 1, max_num_seqs=3)
    ended: list[int] = []
    names = ["a", "a", "b", "c", *"aaaaaaaaaaaaaaaaaaaa"]
    for name in [*names, *[None] * 60]:
        if name:
            site.ask(name, max_tokens=4)
        for each in site.engine.take_ready():
            assert each.fault is None
        ended += [o.request_id for _, o in site.engine.step() if o.finish_reason is FinishReason.LENGTH]
        if site.fake.runner.loads and not site.fake.runner.loads[-1][2].done():
            site.end_load()
        site.engine.scheduler.check_integrity()
    assert sorted(ended) == list(range(len(names)))
    assert ended.index(2) < 8
    assert ended.index(3) < 10
    assert [name for _, name in site.loads] == ["a", "b", "c", "a"]


def test_a_load_that_fails_fails_its_requests_alone(site: Site) -> None:
    for name in ("a", "b", "a", None):
        site.ask(name)
    faults(site.engine)
    site.end_load(0, ModelError("rank must be at most 8, got 9"))
    site.end_load(1)
    (first, second, third) = site.engine.take_ready()
    assert {first.fault, second.fault} == {"the adapter a cannot be loaded: rank must be at most 8, got 9"}
    assert (first.reason, third.fault) == (RejectReason.ADAPTER, None)
    assert site.step() == {1, 3}
    assert site.engine.pending.adapters.use().resident == ("b",)
    site.ask("a")  # tries again
    faults(site.engine)
    site.end_load(error=MemoryError("full"))
    assert faults(site.engine) == {4: "the adapter a cannot be loaded: MemoryError: full"}


def test_files_that_changed_are_not_used_under_the_old_content(site: Site) -> None:
    site.ask("a")
    faults(site.engine)
    config = site.folder / "a" / "adapter_config.json"
    config.write_text("{}")  # while it is being loaded
    site.end_load()
    changed = f"the files in {config.parent} have changed; load it again with load_inplace"
    assert faults(site.engine) == {0: f"the adapter a cannot be loaded: {changed}"}
    site.ask("a")  # with the new content
    faults(site.engine)
    site.end_load()
    assert faults(site.engine) == {1: None}


def test_what_is_gone_takes_no_ones_slot(site: Site) -> None:
    for name in ("a", "b"):
        site.ask(name)
        faults(site.engine)
        site.end_load()
        faults(site.engine)
    while site.engine.has_work:
        site.step()
    gone = Adapter("c", str(site.folder / "c"), "")
    site.engine.add(0, replace(add_request([1], 9), adapter=gone))
    assert faults(site.engine) == {9: f"the adapter c cannot be loaded: no such folder: {site.folder / 'c'}"}
    assert site.engine.pending.adapters.use().resident == ("a", "b")
    assert len(site.loads) == 2


def test_adapters_with_modules_of_their_own_take_the_slots_with_room_for_them(tmp_path: Path) -> None:
    """And others take these last, so that they stay free."""
    site = Site(tmp_path, 3, lora_modules_to_save=1)
    header = b'{"base_model.model.lm_head.weight":{"dtype":"F32"}}'
    for name in ("m", "n"):
        folder = Path(adapter(tmp_path, name).folder)
        (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for name in ("a", "m", "b", "n"):  # a is used least recently when n comes
        site.ask(name)
        faults(site.engine)
        site.end_load()
        assert list(faults(site.engine).values()) == [None]
        while site.engine.has_work:
            site.step()
    assert site.loads == [(2, "a"), (1, "m"), (3, "b"), (1, "n")]


def test_prefixes_are_shared_within_one_content_of_an_adapter(site: Site) -> None:
    def hits() -> int:
        faults(site.engine)
        if not site.fake.runner.loads[-1][2].done():
            site.end_load()
            faults(site.engine)
        while site.engine.has_work:
            site.step()
        return site.engine.scheduler.counters.prefix_cache_hits

    site.ask("a")
    site.ask("b")
    faults(site.engine)
    site.end_load(0)
    assert hits() == 0
    site.ask("a")
    assert hits() == 4
    (site.folder / "a" / "adapter_config.json").write_text("{}")
    site.ask("a")
    assert hits() == 4


def test_aborts_and_deadlines_end_the_wait(tmp_path: Path) -> None:
    now = 100.0
    site = Site(tmp_path, 1)
    site.engine.scheduler.clock = lambda: now
    for name, options in (("a", {"num_choices": 2}), ("a", {}), ("b", {}), ("b", {"deadline": 101.0})):
        site.ask(name, **options)
    faults(site.engine)
    site.engine.abort(0, 0, 1)
    site.engine.abort(0, 1)
    assert [site.engine.is_live(0, i) for i in range(4)] == [True, False, True, True]
    site.end_load()
    assert faults(site.engine) == {0: None}
    now = 102.0
    assert faults(site.engine) == {3: "the request's adapter got none of the 1 slots (max_loras) before the deadline"}
    assert [o.index for _, o in site.engine.step() + site.engine.step()] == [0, 0]
    site.engine.abort_connection(0)
    assert (site.engine.has_work, site.engine.num_waiting) == (False, 0)


def test_a_grammar_comes_first_and_the_adapter_after_it(site: Site) -> None:
    compiler = SlowCompiler()
    site.engine.pending.grammars = PendingGrammars(compiler)  # type: ignore[arg-type]
    add = guided(add_request([1], 0, max_tokens=2), "g")
    assert site.engine.add(0, replace(add, adapter=adapter(site.folder, "a"))) is False
    assert (faults(site.engine), site.loads) == ({}, [])
    compiler.finish("g")
    assert (faults(site.engine), site.loads) == ({}, [(1, "a")])
    site.end_load()
    assert faults(site.engine) == {0: None}


def test_a_slot_is_not_taken_from_a_request_whose_grammar_has_just_been_compiled(tmp_path: Path) -> None:
    """It was given the slot that another adapter was then loaded into, all in one call."""
    site, compiler = Site(tmp_path, 1), SlowCompiler()
    site.engine.pending.grammars = PendingGrammars(compiler)  # type: ignore[arg-type]
    site.ask("a")
    faults(site.engine)
    site.end_load()
    faults(site.engine)
    while site.engine.has_work:
        site.step()
    add = guided(add_request([1], 1, max_tokens=2), "g")
    site.engine.add(0, replace(add, adapter=adapter(tmp_path, "a")))
    site.num_requests += 1
    site.ask("b")
    compiler.finish("g")
    assert (faults(site.engine), site.loads) == ({1: None}, [(1, "a")])
    while site.step():
        pass
    assert (faults(site.engine), site.loads) == ({}, [(1, "a"), (1, "b")])


def test_without_slots_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RejectedError, match="got a: max_loras must be at least 1, but is 0"):
        Site(tmp_path, 0).ask("a")


def test_what_is_told_of_adapters(site: Site) -> None:
    for name in ("b", "a", "c"):
        site.ask(name, max_tokens=50)
        faults(site.engine)
        site.end_load() if len(site.loads) < 3 and not site.fake.runner.loads[-1][2].done() else None
        faults(site.engine)
    site.step()
    use = site.engine.pending.adapters.use()
    assert (use.running, use.waiting, use.resident) == (("a", "b"), ("c",), ("a", "b"))


def test_a_disk_that_hangs_costs_who_waits_for_it_a_bounded_time_and_no_one_a_slot(tmp_path: Path) -> None:
    """The step loop itself looked for the files, and then stood still with all that ran."""
    now, site = 100.0, Site(tmp_path, 1)
    site.engine.scheduler.clock = lambda: now
    site.ask("a")
    faults(site.engine)
    site.end_load()
    assert faults(site.engine) == {0: None}
    while site.engine.has_work:
        site.step()
    site.files.stuck = {"b", "c"}
    for name in ("b", "b", "c"):
        site.ask(name)
    assert (faults(site.engine), site.engine.pending.adapters.use().resident) == ({}, ("a",))
    now += ADAPTER_S / 2
    site.ask("d")
    assert faults(site.engine) == {}
    site.end_load()
    assert faults(site.engine) == {4: None}
    site.engine.abort(0, 3)
    now += ADAPTER_S / 2 + 1
    late = "the adapter b cannot be loaded: its files cannot be read within 300 s"
    assert faults(site.engine) == {1: late, 2: late}
    assert all(future.cancelled() for future in site.files.asked[1:3])
    site.files.stuck = set()
    site.ask("b")  # the disk is there again


def test_a_load_that_hangs_is_given_up_by_who_waits_for_it(site: Site) -> None:
    now = 100.0
    site.engine.scheduler.clock = lambda: now
    site.ask("a")
    site.ask("b")
    faults(site.engine)
    site.end_load()
    assert faults(site.engine) == {1: None}
    now += ADAPTER_S + 1
    assert faults(site.engine) == {0: "the adapter a cannot be loaded: its files cannot be read within 300 s"}
    site.end_load(0)
    assert faults(site.engine) == {}
    assert site.ask("a")  # it came in the end
