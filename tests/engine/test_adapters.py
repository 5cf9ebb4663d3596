"""The seam for adapters holds: an executor that knows some finds in every batch whose request uses which."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fake_runner import VOCAB_SIZE, FakeLaunched, FakeRunner, make_engine
from tests.engine.process_executor import decode, encode
from weft.engine.batch import Batch, StepResult
from weft.engine.loop.engine import Engine
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.options import Adapter, find_adapter
from weft.engine.wire.params import SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
ADAPTERS: dict[str, Adapter] = {}


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    ADAPTERS.update({name: find_adapter(name, tmp_path) for name in ("formal", "brief")})


class AdaptingRunner:
    """The fake runner behind a border that only bytes cross; adapter i adds i to every id that is sampled."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self.adapters: list[list[int] | None] = []

    def load_adapter(self, slot: int, folder: Path) -> "Future[str]":
        loaded: Future[str] = Future()
        loaded.set_result(find_adapter("", folder).content)
        return loaded

    def launch(self, batch: Batch, masks: object = None) -> FakeLaunched:
        batch = decode(Batch, encode(batch))
        self.adapters.append(None if batch.adapters is None else batch.adapters.tolist())
        launched = self._runner.launch(batch)
        if batch.adapters is not None:
            owners = batch.query_start_locs.searchsorted(batch.row_indices, side="right") - 1
            added = batch.adapters[owners].tolist()
            ids = [(i + a) % VOCAB_SIZE for i, a in zip(launched.token_ids, added, strict=True)]
            launched.token_ids[:] = ids  # in place: the next step takes them from here
        return launched

    def collect(self, launched: FakeLaunched) -> StepResult:
        return self._runner.collect(launched)


def adapting_engine(*, overlap: bool = False) -> tuple["Engine[Any]", AdaptingRunner]:
    fake = make_engine(overlap=overlap, max_loras=2)
    runner: Any = AdaptingRunner(fake.runner)
    fake.engine._executor = fake.engine.pending.adapters._executor = runner
    fake.engine.pending.adapters.load_first({name: each.folder for name, each in ADAPTERS.items()})
    return fake.engine, runner


def run(engine: "Engine[Any]", *adapters: str | None) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in adapters]
    for number, adapter in enumerate(adapters):
        params = SamplingParams(temperature=0.0, max_tokens=6)
        named = None if adapter is None else ADAPTERS[adapter]
        engine.add(0, AddRequest(TokensInput(PROMPT), params, adapter=named, request_id=number))
    while engine.has_work:
        for _, output in engine.step():
            ids[output.request_id] += output.token_ids
        engine.scheduler.check_integrity()
    return ids


@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_uses_its_own_adapter(overlap: bool) -> None:
    alone = [run(adapting_engine(overlap=overlap)[0], name)[0] for name in (None, "formal", "brief")]
    assert len({tuple(ids) for ids in alone}) == 3
    engine, runner = adapting_engine(overlap=overlap)
    assert run(engine, "brief", None, "formal", None) == [alone[2], alone[0], alone[1], alone[0]]
    assert [2, 0, 1, 0] in runner.adapters


def test_who_uses_another_adapter_shares_no_blocks() -> None:
    engine, _ = adapting_engine()
    run(engine, None)
    run(engine, "formal")
    assert engine.scheduler.counters.prefix_cache_hits == 0
    run(engine, "formal")
    assert engine.scheduler.counters.prefix_cache_hits == 8


def test_a_batch_of_the_model_itself_names_none() -> None:
    engine, runner = adapting_engine()
    run(engine, None, None)
    assert runner.adapters and all(indices is None for indices in runner.adapters)
