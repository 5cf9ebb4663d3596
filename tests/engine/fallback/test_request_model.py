"""Modules that run request by request: which way they go on, and what they keep."""

import logging
from pathlib import Path

import pytest
import torch

from tests.architectures.checkpoints import write
from weft.engine import config as engine_config
from weft.engine.cache.specs import ModuleCache
from weft.engine.fallback import parity
from weft.engine.fallback.request_model import GoingOn, RequestModel
from weft.engine.kernels.torch.caches import Context
from weft.engine.start.model_choice import plan_model, read_model
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions


def load(folder: Path, dtype: str = "float32") -> RequestModel:
    facts = read_model(folder, "transformers")
    config = engine_config.resolve(EngineOptions(model=str(folder), device="cpu", dtype=dtype), facts)
    model = plan_model(facts, config).load(folder, lambda done, total: None)
    assert isinstance(model, RequestModel)
    return model


@pytest.mark.parametrize(
    ("name", "dtype", "way"),
    [
        ("gpt_neo", "float32", GoingOn.CHUNKS),
        ("gpt_neo", "bfloat16", GoingOn.CHUNKS),
        ("zamba", "float32", GoingOn.ONE_BY_ONE),  # forgets its convolution between chunks
        ("recurrent_gemma", "float32", GoingOn.AGAIN),  # keeps its state in the module, where all requests share it
        ("openai-gpt", "float32", GoingOn.AGAIN),  # has no cache
    ],
)
def test_a_module_goes_on_as_it_rightly_can(tmp_path: Path, name: str, dtype: str, way: GoingOn) -> None:
    assert load(write(name, tmp_path), dtype).going_on is way


def test_what_a_context_takes_is_measured(tmp_path: Path) -> None:
    model = load(write("gpt_neo", tmp_path))
    assert model.cache_specs[0] == ModuleCache(bytes_per_token=2 * 2 * 64 * 4, bytes_per_request=0)  # layers, K and V
    state = load(write("rwkv", tmp_path / "rwkv")).cache_specs[0]
    assert state == ModuleCache(bytes_per_token=0, bytes_per_request=5 * 2 * 64 * 4)  # five states of two layers


def test_a_module_that_answers_otherwise_in_parts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(self: RequestModel, context: Context, token_ids: torch.Tensor, num_rows: int) -> torch.Tensor:
        return torch.randn(token_ids.shape[1], 199)

    monkeypatch.setattr(RequestModel, "go_on", noisy)
    with pytest.raises(ModelError, match="answers differently in parts"):
        load(write("gpt_neo", tmp_path))


def test_the_log_says_that_it_is_slow_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load(write("rwkv", tmp_path))
    assert "RwkvForCausalLM runs request by request, which is slow: it keeps a recurrent state" in caplog.text
    assert "requests go on in chunks" in caplog.text


def test_a_large_module_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "_MAX_COMPARED_BYTES", {"cpu": 0})
    monkeypatch.setattr(parity, "_choose_way", None)
    assert load(write("gpt_neo", tmp_path)).going_on is GoingOn.ONE_BY_ONE
