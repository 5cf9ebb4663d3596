from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from weft import server
from weft.engine.cache.specs import PagedKV, group_layers
from weft.engine.kernels.triton.prompt_attention import find_prompts
from weft.engine.models.config import load_model_config
from weft.engine.models.tensor_names import decoder_spec
from weft.engine.run import prefill_choice
from weft.engine.run.config import EngineConfig, resolve
from weft.engine.run.prefill_choice import settle_prefill
from weft.engine.shared.errors import ModelError
from weft.engine.shared.messages import EngineOptions
from weft.engine.step.batch import Batch

DEMO = Path(server.__file__).parent / "demo_model"


def settle(monkeypatch: pytest.MonkeyPatch, is_faster: bool, **options: Any) -> str:
    """What attends in fresh prompts on a GPU, where FlashAttention is faster or not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(prefill_choice, "_is_flash_faster", lambda spec, num_heads, config: is_faster)
    model = load_model_config(DEMO)
    config = resolve(EngineOptions(model=str(DEMO), **{"device": "cuda"} | options), model)
    return settle_prefill(group_layers(decoder_spec(model).caches), config, model.num_heads).prefill_attention


def test_flash_attention_is_taken_where_it_is_faster_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_choice, "has_triton", lambda device: True)
    assert settle(monkeypatch, True) == "flash"
    assert settle(monkeypatch, False) == "triton"
    assert settle(monkeypatch, True, prefill_attention="triton") == "triton"
    assert settle(monkeypatch, False, prefill_attention="flash") == "flash"
    for options in ({"deterministic": True}, {"dtype": "float32"}):
        assert settle(monkeypatch, True, **options) == "triton"
        with pytest.raises(ModelError, match=r"^prefill_attention flash needs dtype bfloat16 or float16, heads of"):
            settle(monkeypatch, True, prefill_attention="flash", **options)
    with pytest.raises(ModelError, match=r"^prefill_attention flash needs device cuda, got cpu$"):
        settle(monkeypatch, True, prefill_attention="flash", device="cpu")
    assert settle(monkeypatch, True, device="cpu") == "auto"
    monkeypatch.setattr(prefill_choice, "has_triton", lambda device: False)
    assert settle(monkeypatch, True) == "auto"
    with pytest.raises(ModelError, match=r"^prefill_attention triton needs Triton and a C compiler"):
        settle(monkeypatch, True, prefill_attention="triton")


class Layer:
    """A backend of which only the shapes of what it attends to are known."""

    def __init__(self, error: str = "") -> None:
        self._error = error
        self.shapes: list[torch.Size] = []

    def begin(self, batch: Batch) -> "Layer":
        prompts = find_prompts(batch, batch.groups[0])
        assert prompts
        assert prompts.are_fresh
        return self

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if self._error:
            raise RuntimeError(self._error)
        self.shapes += [queries.shape, keys.shape, values.shape]
        return queries


def is_faster(monkeypatch: pytest.MonkeyPatch, layers: dict[str, Layer], config: EngineConfig) -> bool:
    monkeypatch.setattr(prefill_choice, "make_backend", lambda groups, num, chosen, _: layers[chosen.prefill_attention])
    return prefill_choice._is_flash_faster(PagedKV(2, 32), 6, config)


@pytest.mark.parametrize(("own_ms", "flash_ms", "expected"), [(2.0, 1.0, True), (1.0, 2.0, False)])
def test_the_faster_one_is_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own_ms: float, flash_ms: float, expected: bool
) -> None:
    times = iter([own_ms + 1, own_ms] * 2 + [own_ms] + [flash_ms + 9] * 4 + [flash_ms])

    def measure(call: Callable[[], object]) -> float:
        call()
        return next(times)

    monkeypatch.setattr(prefill_choice, "_measure", measure)
    config = resolve(EngineOptions(model=str(DEMO), device="cpu", max_num_batched_tokens=5000), load_model_config(DEMO))
    layers = {"triton": Layer(), "flash": Layer()}
    with caplog.at_level("INFO", "weft.engine.run.prefill_choice"):
        assert is_faster(monkeypatch, layers, config) is expected
    assert all(layer.shapes[:3] == [(5000, 6, 32), (5000, 2, 32), (5000, 2, 32)] for layer in layers.values())
    assert f"Triton {own_ms:.3f} ms, FlashAttention 2 {flash_ms:.3f} ms" in caplog.text


def test_where_torch_has_no_flash_attention_it_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefill_choice, "_measure", lambda call: float(call() is None))
    config = resolve(EngineOptions(model=str(DEMO), device="cpu"), load_model_config(DEMO))
    layers = {"triton": Layer(), "flash": Layer("no kernel image")}
    assert not is_faster(monkeypatch, layers, config)
    assert "FlashAttention 2 cannot be used: no kernel image" in caplog.text
