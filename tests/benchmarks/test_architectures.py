"""benchmarks/architectures: what a step touches, against sums by hand, and a short run."""

import json
from pathlib import Path

import pytest

from benchmarks.architectures import __main__ as command
from benchmarks.architectures.models import SHAPES, VOCAB_SIZE, Touched, model_folder

HEAD = VOCAB_SIZE * 1024


def test_experts_that_have_rows_are_read_and_no_others(tmp_path: Path) -> None:
    touched = Touched.read(model_folder(tmp_path, "experts"))
    attention = 1024 * (16 + 4) * 128 + 16 * 128 * 1024 + 2 * 128 + 2 * 1024
    layers = 6 * (attention + 64 * 1024)
    assert touched.weight_bytes(48) == 2 * (HEAD + layers + 1024 + 48 * 3 * 1024 * 384)
    assert touched.cache_bytes(100) == 100 * 6 * 2 * 2 * 128 * 2


def test_windows_latents_and_states(tmp_path: Path) -> None:
    windows = Touched.read(model_folder(tmp_path, "sinks"))
    assert windows.cache_bytes(500) == 3 * (128 + 500) * 2 * 4 * 64 * 2
    latents = Touched.read(model_folder(tmp_path, "latent"))
    assert latents.cache_bytes(500) == 6 * 500 * (512 + 64) * 2
    hybrid = Touched.read(model_folder(tmp_path, "hybrid"))
    states = 24 * 64 * 128 + (1536 + 2 * 128) * 3  # of the state space and of the convolution
    assert hybrid.cache_bytes(500) == 36 * (500 * 2 * 2 * 64 * 2 + 2 * 4 * states)


@pytest.mark.slow
def test_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SCRATCH", tmp_path)
    monkeypatch.setattr("sys.argv", ["", "--models", "experts", "--streams", "1,2", "--context", "16", "--runs", "1"])
    monkeypatch.setitem(SHAPES, "experts", {**SHAPES["experts"], "num_hidden_layers": 2})
    command.main()
    one, two = json.loads((tmp_path / "architectures.json").read_text())["figures"]
    assert (one["streams"], one["experts"], two["streams"]) == (1, 16, 2)
    assert 16 <= two["experts"] <= 32 and one["ratio"] > 0.5
