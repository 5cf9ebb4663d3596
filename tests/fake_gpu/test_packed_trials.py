"""Trials of packed matrices on a GPU that is not there."""

from pathlib import Path

import pytest
import torch

from tests.architectures.checkpoints import write
from tests.fake_gpu.gpu import FakeGpu
from weft.engine.models.config import load_model_config
from weft.engine.run import config as engine_config
from weft.engine.run import packed_trials
from weft.engine.run.packed_trials import PackedTrials, packed_parts
from weft.engine.shared.messages import EngineOptions


def test_what_is_timed_can_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph holds no copy from the host, as the ends of experts' rows were: nothing could be timed or kept."""
    folder = write("qwen3_moe", tmp_path / "model", {"moe_intermediate_size": 64})
    model = load_model_config(folder)
    options = EngineOptions(model=str(folder), device="cuda", dtype="bfloat16", quantization="int4")
    monkeypatch.setattr(packed_trials, "_draw", lambda config, seed, *shape: torch.empty(*shape, device=config.device))
    with FakeGpu(compiles=False) as gpu, torch.inference_mode():
        config = engine_config.resolve(options, model)
        parts = packed_parts(model, config)
        assert {part.is_expert for part in parts.values()} == {False, True}
        trial = PackedTrials(model, config, parts).trial(config)
        trial.outputs()
        gpu.cuda.waits.clear()
        trial.run()
    assert gpu.cuda.waits == []
