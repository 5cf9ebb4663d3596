"""Trials of packed matrices on a GPU that is not there."""

import json
from pathlib import Path

import pytest
import torch

from tests.architectures.checkpoints import write
from tests.checkpoints import Checkpoint, write_config
from tests.fake_gpu.gpu import FakeGpu
from weft.engine import config as engine_config
from weft.engine.describe.config import load_model_config
from weft.engine.tune import components
from weft.engine.tune import triton_trials as packed_trials
from weft.engine.tune.triton_trials import PackedTrials, packed_parts
from weft.engine.wire.messages import EngineOptions


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


def test_experts_that_will_be_plain_are_not_tried_packed(tmp_path: Path) -> None:
    """Those with `desc_act` are: the trial failed, and then all other matrices were dequantized, too."""
    sizes = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 64}
    folder = write_config(Checkpoint("qwen3_moe", sizes), tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": stored}))
    model = load_model_config(folder)
    options = EngineOptions(model=str(folder), device="cuda", dtype="bfloat16")
    with FakeGpu(compiles=False):
        config = engine_config.resolve(options, model)
        assert {part.is_expert for part in packed_parts(model, config).values()} == {False}
        assert components._COMPONENTS["cuda"]["experts"]("experts", model, config) is not None
