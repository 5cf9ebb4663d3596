"""What computes the adapters of a model."""

import dataclasses
from pathlib import Path

import pytest

from tests.triton_interpreter import needs_triton
from weft import server
from weft.engine import config as engine_config
from weft.engine.describe.tensor_names import decoder_spec
from weft.engine.kernels.torch.adapters import TorchSite
from weft.engine.kernels.torch.torch_kit import TorchKit
from weft.engine.models.config import load_model_config
from weft.engine.run import adapter_choice
from weft.engine.shared.messages import EngineOptions
from weft.engine.weights.refs import WeightRef

DEMO = Path(server.__file__).parent / "demo_model"


@needs_triton
def test_adapters_on_cuda_are_computed_by_what_was_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's keep a rank that is a power of two."""
    from weft.engine.kernels.triton.adapters import TritonSite

    monkeypatch.setattr(adapter_choice, "has_triton", lambda device: True)
    model = load_model_config(DEMO)
    options = EngineOptions(model=str(DEMO), device="cpu", max_loras=1, max_lora_rank=9)
    config, spec = engine_config.resolve(options, model), decoder_spec(model)
    ref = next(ref for ref in spec.weights if isinstance(ref, WeightRef))
    planned = {}
    for chosen, kind in (("triton", TritonSite), ("torch", TorchSite)):
        named = dataclasses.replace(config, kernels={"adapters": chosen})
        adapters = adapter_choice.choose_adapters(model, named, TorchKit(), spec, spec)
        assert adapters is not None and type(adapters.matrix_site(ref)) is kind
        planned[chosen] = adapters.planned_bytes(spec)
    assert planned["triton"] * 9 == planned["torch"] * 16
