"""Several ranks each compute their part of the adapters, which all read when the engine asks for it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.architectures.checkpoints import write
from tests.engine.lora.adapters_for_tests import check_all, start_engine, write_adapter
from tests.engine.run.test_ranks import ForkedRank, keep_threads

__all__ = ["keep_threads"]


@pytest.mark.parametrize(
    ("model", "changes", "config", "ranks"),
    [
        ("llama", {"num_key_value_heads": 1}, {}, {"tensor_parallel_size": 2}),
        ("phi3", {}, {"target_modules": r".*(qkv_proj|down_proj|embed_tokens|lm_head)"}, {"tensor_parallel_size": 2}),
        ("llama", {}, {}, {"pipeline_parallel_size": 2}),
    ],
)
def test_answers_are_those_of_peft(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    changes: dict[str, Any],
    config: dict[str, Any],
    ranks: dict[str, int],
) -> None:
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)
    folder = write(model, tmp_path / "model", changes)
    references: dict[str | None, Any] = {
        name: write_adapter(folder, tmp_path / name, seed, **config) for seed, name in enumerate(("one", "two"))
    }
    engine = start_engine(folder, {name: tmp_path / name for name in references if name}, **ranks)
    check_all(engine, references)
    engine._executor.close()
