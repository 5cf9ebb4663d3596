"""What computes the adapters of a model."""

import dataclasses
from pathlib import Path

import pytest

from tests.triton_interpreter import needs_triton
from weft import server
from weft.engine import config as engine_config
from weft.engine.describe.config import load_model_config
from weft.engine.kernels import choice as adapter_choice
from weft.engine.kernels.torch.layer_kernels import TorchKernels, TorchSite
from weft.engine.parts.decoder import decoder_spec
from weft.engine.weights.reader import WeightRef
from weft.engine.wire.messages import EngineOptions

DEMO = Path(server.__file__).parent / "demo_model"


@needs_triton
def test_adapters_on_cuda_are_computed_by_what_was_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's keep a rank that is a power of two."""
    from weft.engine.kernels.triton.products import TritonSite

    monkeypatch.setattr(adapter_choice, "has_triton", lambda device: True)
    model = load_model_config(DEMO)
    options = EngineOptions(model=str(DEMO), device="cpu", max_loras=1, max_lora_rank=9)
    config, spec = engine_config.resolve(options, model), decoder_spec(model)
    ref = next(ref for ref in spec.weights if isinstance(ref, WeightRef))
    planned = {}
    for chosen, kind in (("triton", TritonSite), ("torch", TorchSite)):
        named = dataclasses.replace(config, kernels={"adapters": chosen})
        adapters = adapter_choice.choose_adapters(model, named, TorchKernels(), spec, spec)
        assert adapters is not None and type(adapters.matrix_site(ref)) is kind
        planned[chosen] = adapters.planned_bytes(spec)
    assert planned["triton"] * 9 == planned["torch"] * 16
