"""benchmarks/lora: every side is measured, with as many adapters as it says."""

import argparse
import pathlib

import pytest
from rich.console import Console

from benchmarks import lora


def test_sides_take_turns(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "SCRATCH", tmp_path)
    used: list[set[int]] = []
    use = lora.Streams.use

    def watch(streams: lora.Streams, num_adapters: int) -> None:
        use(streams, num_adapters)
        used.append({request.adapter_slot for request in streams.engine.scheduler.running})

    monkeypatch.setattr(lora.Streams, "use", watch)
    options = argparse.Namespace(shape="tiny", streams=4, adapters="2,1", rank=4, runs=2)
    figures = lora.measure(options, Console(quiet=True))
    assert used == [{0}, {0}, {1, 2}, {1}] * 2
    assert {side: len(turns) for side, turns in figures.turns.items()} == {
        lora.WITHOUT_SLOTS: 2,
        lora.WITHOUT: 2,
        "2 adapters": 2,
        "1 adapters": 2,
    }
    assert lora.table(figures).row_count == 4
