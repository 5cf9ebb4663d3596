"""Pipeline stages of several processes, started as the engine starts them, and answer as transformers does."""

import io
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.architectures.checkpoints import write
from tests.engine.guidance.demo import DEMO_MODEL, PROMPT
from tests.engine.run.test_ranks import ForkedRank, answers, check_ids, keep_threads, options
from weft.engine.run import print_plan
from weft.engine.run.startup import start
from weft.engine.shared.errors import ModelError

__all__ = ["keep_threads"]


@pytest.fixture(autouse=True)
def fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_stages"),
    [
        ("llama", 1, 2),
        ("llama", 2, 2),
        ("gpt2", 1, 3),  # a tied embedding, learned positions
        ("gpt_oss", 1, 2),  # windows, experts
        ("qwen2_moe", 2, 2),
        ("qwen3_next", 1, 4),  # stages without attention, or without states
        ("recurrent_gemma", 1, 3),
        ("mamba", 1, 2),
    ],
)
def test_ids_are_those_of_transformers(tmp_path: Path, name: str, num_ranks: int, num_stages: int) -> None:
    check_ids(write(name, tmp_path), num_ranks, num_stages)
