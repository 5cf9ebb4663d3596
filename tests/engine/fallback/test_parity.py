from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.fallback.checkpoints import write
from weft.engine import config as engine_config
from weft.engine.cache.specs import group_layers
from weft.engine.config import EngineConfig
from weft.engine.fallback import parity
from weft.engine.fallback.config import FallbackConfig
from weft.engine.fallback.loading import TransformersModel, load_fallback
from weft.engine.kernels.choice import make_caches
from weft.engine.start.model_choice import read_model
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions


def loaded(folder: Path, dtype: str, max_model_len: int = 64) -> tuple[FallbackConfig, EngineConfig, TransformersModel]:
    facts = read_model(folder, "transformers")
    assert isinstance(facts, FallbackConfig)
    config = engine_config.resolve(
        EngineOptions(model=str(folder), device="cpu", dtype=dtype, max_model_len=max_model_len), facts
    )
    return facts, config, load_fallback(folder, facts, device=config.device, dtype=config.dtype)


def compare(facts: FallbackConfig, config: EngineConfig, model: TransformersModel) -> None:
    caches = make_caches(group_layers(model.cache_specs), parity.num_blocks(config), config, facts.num_heads)
    parity.compare(model, caches, config, facts.vocab_size)


@pytest.mark.parametrize(
    ("dtype", "max_model_len"), [("float32", 64), ("bfloat16", 64), ("float16", 64), ("float32", 1)]
)
def test_a_right_model_passes(tmp_path: Path, dtype: str, max_model_len: int) -> None:
    compare(*loaded(write("starcoder2", tmp_path), dtype, max_model_len))


def forget_positions(model: TransformersModel) -> None:
    forward = model.forward
    model.forward = lambda ids, positions, *rest: forward(ids, positions * 0, *rest)  # type: ignore[method-assign]


def scale_heads(model: TransformersModel) -> None:
    compute = model.compute_logits
    model.compute_logits = lambda hidden: compute(hidden) * 1.02  # type: ignore[method-assign]


def mix_caches(model: TransformersModel) -> None:
    parts = [part for part in model._module.modules() if hasattr(part, "weft_cache")]
    parts[1].weft_cache = parts[0].weft_cache


def make_nan(model: TransformersModel) -> None:
    with torch.no_grad():
        next(model._module.parameters()).fill_(float("nan"))


@pytest.mark.parametrize("spoil", [forget_positions, scale_heads, mix_caches, make_nan])
def test_a_wrong_one_is_refused(tmp_path: Path, spoil: Callable[[TransformersModel], None]) -> None:
    facts, config, model = loaded(write("starcoder2", tmp_path), "float32")
    spoil(model)
    with pytest.raises(ModelError, match="answers differently over Weft's cache"):
        compare(facts, config, model)


def test_a_module_that_fails_is_refused_in_one_line(tmp_path: Path) -> None:
    facts, config, model = loaded(write("starcoder2", tmp_path), "float32")
    del model._module.lm_head
    with pytest.raises(ModelError, match=r"^transformers' module does not run \(AttributeError: [^\n]*\)$"):
        compare(facts, config, model)
