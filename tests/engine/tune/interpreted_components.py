"""What is settled on CUDA, with the kernels in Triton's interpreter; times are invented."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.architectures.checkpoints import write as write_architecture
from tests.checkpoints import write_config
from tests.engine.tune.test_components import GEMMA4
from weft import server
from weft.engine import config as engine_config
from weft.engine.describe.config import load_model_config
from weft.engine.families.experts import Gating
from weft.engine.kernels import choice as kernel_choice
from weft.engine.kernels.torch.layer_kernels import TorchExperts
from weft.engine.kernels.triton import products as experts
from weft.engine.kernels.triton.attention import TritonBackend
from weft.engine.kernels.triton.layer_kernels import TritonKernels
from weft.engine.kernels.triton.products import TritonExperts, TritonSite
from weft.engine.parts.decoder import decoder_spec
from weft.engine.tune import components
from weft.engine.tune import layer_trials as experts_trials
from weft.engine.tune.compare import ChoiceFile, Tuner
from weft.engine.weights.reader import DenseReader, ExpertsRef
from weft.engine.weights.tensor_files import RandomSource
from weft.engine.wire.machine import KernelChoice
from weft.engine.wire.messages import EngineOptions

CPU = torch.device("cpu")
ON_CUDA = components._COMPONENTS["cuda"]
DEMO = Path(server.__file__).parent / "demo_model"


def settle(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *names: str,
    dtype: str = "float32",
    model_folder: Path = DEMO,
    max_loras: int = 0,
) -> dict[str, KernelChoice]:
    monkeypatch.setattr(kernel_choice, "has_triton", lambda device: True)
    monkeypatch.setattr(components, "_COMPONENTS", {"cpu": {name: ON_CUDA[name] for name in names or ON_CUDA}})
    model = load_model_config(model_folder)
    sizes: dict[str, Any] = {"max_num_seqs": 2, "block_size": 16, "max_num_batched_tokens": 32, "max_model_len": 20}
    options = EngineOptions(model=str(model_folder), device="cpu", dtype=dtype, max_loras=max_loras, **sizes)
    config = engine_config.resolve(options, model)
    file = ChoiceFile(folder / "settled.json", "here")
    times = iter(range(1, 99))
    config = components.tune_kernels(model, config, Tuner(file, lambda run: float(next(times))))
    settled = {choice.component: choice for choice in file.of_this_machine()}
    assert config.kernels == {name: choice.chosen for name, choice in settled.items()}
    return settled


def test_triton_is_right_and_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settled = settle(monkeypatch, tmp_path)
    assert list(settled) == ["decode_attention", "prefill_attention", "norm_and_activation", "sampler"]
    chosen = [choice.chosen for choice in settled.values()]
    assert chosen == ["triton-16k", "triton-32", "triton", "triton"]  # float32 has one tile for prompts
    _, flash = settled["prefill_attention"].verdicts
    assert flash.candidate == "flash2" and flash.fault.startswith("prefill_attention flash2 needs plain attention")
    own, torch_s = settled["norm_and_activation"].verdicts  # the only component with two right candidates
    assert (own.seconds, torch_s.seconds) == (1.0, 2.0) and torch_s.error is not None


def test_few_rows_have_three_candidates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In float16, since the interpreter reads bfloat16 in a product as integers; times are invented, the first wins."""
    names = "norm_and_activation", "few_row_products"
    folder = write_architecture("llama", tmp_path / "model")
    settled = settle(monkeypatch, tmp_path, *names, dtype="float16", model_folder=folder)["few_row_products"]
    assert [verdict.candidate for verdict in settled.verdicts] == ["triton", "triton-2", "cublas"]
    assert all(verdict.seconds and verdict.error is not None and not verdict.fault for verdict in settled.verdicts)
    assert settled.chosen == "triton"


def test_tiles_of_wide_heads_are_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_config(GEMMA4, tmp_path / "gemma4")
    names = "decode_attention", "prefill_attention"
    settled = settle(monkeypatch, tmp_path, *names, dtype="float16", model_folder=folder)
    assert [choice.chosen for choice in settled.values()] == ["triton-16k", "triton-64"]
    assert not settled["decode_attention"].verdicts[0].fault


def test_attention_that_is_wrong_is_torch_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch's reads no cache of Triton's, so it then computes prompts, too."""
    attend = TritonBackend.attend

    def shift(self: TritonBackend, *args: Any) -> torch.Tensor:
        return attend(self, *args).roll(1, 1)

    monkeypatch.setattr(TritonBackend, "attend", shift)
    settled = settle(monkeypatch, tmp_path, "decode_attention", "prefill_attention", "norm_and_activation")
    assert {name: choice.chosen for name, choice in settled.items()} == {
        "decode_attention": "torch",
        "prefill_attention": "torch",
        "norm_and_activation": "triton",
    }
    assert settled["decode_attention"].verdicts[0].fault.startswith("wrong: its error is")


def test_experts_whose_kernel_is_wrong_are_torch_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing could replace them: all candidates of a block had the same experts."""
    monkeypatch.setattr(components, "has_triton", lambda device: True)
    monkeypatch.setattr(experts_trials, "_ROWS", (1, 9))
    folder = write_architecture("qwen3_moe", tmp_path / "model")
    model, source = load_model_config(folder), RandomSource(0, torch.float16, CPU, 1.0)
    spec = next(ref for ref in decoder_spec(model).weights if isinstance(ref, ExpertsRef))

    def kind_of_experts(name: str) -> type:
        chosen = settle(monkeypatch, tmp_path / name, "experts", dtype="float16", model_folder=folder)["experts"].chosen
        return type(
            TritonKernels(experts=chosen).experts(spec, spec, DenseReader(source, CPU, torch.float16, 1), Gating())
        )

    assert kind_of_experts("right") is TritonExperts
    multiply = experts.multiply_groups
    monkeypatch.setattr(experts, "multiply_groups", lambda *args: multiply(*args).mul_(1.2))
    assert kind_of_experts("wrong") is TorchExperts


def test_adapters_whose_kernels_are_wrong_are_torch_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They served whatever they computed."""
    monkeypatch.setattr(components, "has_triton", lambda device: True)
    assert settle(monkeypatch, tmp_path / "right", "adapters", max_loras=2)["adapters"].chosen == "triton"
    monkeypatch.setattr(TritonSite, "add", lambda site, outputs, inputs, rows: outputs.add_(inputs))
    settled = settle(monkeypatch, tmp_path / "wrong", "adapters", max_loras=2)["adapters"]
    assert settled.chosen == "torch" and settled.verdicts[0].fault.startswith("wrong: its error is")
