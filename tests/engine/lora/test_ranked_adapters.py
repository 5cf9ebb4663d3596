"""Several ranks each compute their part of the adapters, which all read when the engine asks for it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.architectures.checkpoints import write
from tests.engine.lora.adapters_for_tests import check_all, start_engine, write_adapter
from tests.engine.ranks.test_ranks import ForkedRank, keep_threads
from weft.engine.lora import adapters
from weft.engine.wire.errors import ModelError
from weft.engine.wire.options import Adapter

__all__ = ["keep_threads"]


@pytest.mark.parametrize(
    ("model", "changes", "config", "ranks"),
    [
        ("llama", {"num_key_value_heads": 1}, {}, {"tensor_parallel_size": 2}),
        ("phi3", {}, {"target_modules": r".*(qkv_proj|down_proj|embed_tokens|lm_head)"}, {"tensor_parallel_size": 2}),
        ("deepseek_v2", {}, {"target_modules": r".*(q_proj|o_proj)"}, {"pipeline_parallel_size": 2}),
        (
            "llama",
            {"tie_word_embeddings": True},
            {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
            {"tensor_parallel_size": 2, "lora_modules_to_save": 2},
        ),
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
    engine = start_engine(folder, {name: tmp_path / name for name in references if name}, max_loras=3, **ranks)
    try:
        check_all(engine, references)
        if model == "deepseek_v2":
            check_a_fault_of_a_later_rank(engine, folder, tmp_path / "bad")
            check_other_files_on_a_rank(engine, tmp_path / "one", monkeypatch)
            check_all(engine, references)
    finally:
        engine._executor.close()


def check_a_fault_of_a_later_rank(engine: Any, model: Path, folder: Path) -> None:
    """It ended the rank, and so the engine, once the adapter was used."""
    write_adapter(model, folder, target_modules=["kv_b_proj"], layers_to_transform=[1])
    with pytest.raises(ModelError, match=r"^rank 1: .*kv_b_proj.* adapters of this matrix are not served"):
        engine._executor.load_adapter(3, folder).result()


def check_other_files_on_a_rank(engine: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine has files of its own, and a part of each adapter was computed from either."""
    monkeypatch.setattr(adapters, "find_adapter", lambda name, folder: Adapter(name, str(folder), "other"))
    with pytest.raises(ModelError, match=r"^rank 1 finds other files there than the first rank$"):
        engine._executor.load_adapter(3, folder).result()
