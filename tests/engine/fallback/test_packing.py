from pathlib import Path

import pytest
import torch

from tests.engine.fallback.checkpoints import write
from weft.engine import config as engine_config
from weft.engine.fallback.config import load_fallback_config
from weft.engine.fallback.loading import TransformersModel, load_fallback
from weft.engine.families.registry import identify
from weft.engine.kernels.cpu import library
from weft.engine.kernels.cpu.layer_kernels import CpuKernels
from weft.engine.start.model_choice import plan_model, read_model
from weft.engine.wire.messages import EngineOptions

IDS = torch.arange(4, 24).view(2, 10)


def load(folder: Path, kernels: CpuKernels | None) -> TransformersModel:
    config = load_fallback_config(folder, identify(folder))
    with torch.inference_mode():
        return load_fallback(folder, config, device=torch.device("cpu"), dtype=torch.bfloat16, kernels=kernels)


@pytest.fixture
def kernels() -> CpuKernels:
    native = library.load()
    if native is None:
        pytest.skip("no native kernels on this machine")
    return CpuKernels(native)


@pytest.mark.parametrize(
    ("name", "num_left"),
    [
        ("starcoder2", 1),  # the embedding
        ("cohere2", 0),  # shared with the head
        ("gemma3_text", 1),  # shared, but its rows are scaled
    ],
)
def test_packed_matrices_give_the_same_logits_and_replace_the_plain_ones(
    tmp_path: Path, kernels: CpuKernels, name: str, num_left: int
) -> None:
    folder = write(name, tmp_path)
    plain, packed = load(folder, None), load(folder, kernels)
    with torch.inference_mode():
        expected, got = plain.plain_logits(IDS), packed.plain_logits(IDS)
    assert (got - expected).square().mean().sqrt() < 0.03 * expected.std()
    assert not torch.equal(got, torch.zeros_like(got))
    left = {id(weight) for weight in packed._module.parameters() if weight.dim() > 1}
    assert len(left) == num_left
    assert packed.weights_bytes == plain.weights_bytes


@pytest.mark.parametrize(("name", "is_packed"), [("phi3", True), ("qwen3_moe", False), ("gpt2", False)])
def test_a_module_with_other_matrices_stays_as_it_is(
    tmp_path: Path, kernels: CpuKernels, name: str, is_packed: bool
) -> None:
    facts = read_model(write(name, tmp_path), "transformers")
    options = EngineOptions(model=str(tmp_path), device="cpu", dtype="bfloat16", max_model_len=64)
    chosen = plan_model(facts, engine_config.resolve(options, facts))
    assert isinstance(chosen.kernels, CpuKernels) == is_packed
    chosen.load(tmp_path, lambda done, total: None)  # with its comparison


def test_float32_stays_as_it_is(tmp_path: Path) -> None:
    facts = read_model(write("phi3", tmp_path), "transformers")
    options = EngineOptions(model=str(tmp_path), device="cpu", dtype="float32", max_model_len=64)
    assert plan_model(facts, engine_config.resolve(options, facts)).kernels is None
