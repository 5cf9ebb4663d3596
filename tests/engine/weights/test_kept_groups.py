"""Matrices that a checkpoint has as integers in groups stay so on a CPU: their bytes, their answers, their experts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import quantized_checkpoints as written
from tests.checkpoints import Checkpoint, load_reference, write_checkpoint
from tests.engine.layers.test_decoder import Runner, make_prompts
from tests.engine.weights.test_quantized import GPTQ, LIBRARIES, OWN, checkpoint, own, root
from weft.engine import config as engine_config
from weft.engine.describe.config import load_model_config
from weft.engine.families.experts import Gating
from weft.engine.kernels.cpu import library
from weft.engine.kernels.cpu.layer_kernels import CpuKernels
from weft.engine.kernels.cpu.layers import NativeLinear
from weft.engine.kernels.cpu.products import NativeExperts
from weft.engine.kernels.torch.layer_kernels import TorchExperts
from weft.engine.layers.feed_forward import Experts
from weft.engine.layers.wrapped_linear import ActOrderLinear
from weft.engine.models.loading import load_weights
from weft.engine.parts.decoder import decoder_spec
from weft.engine.start.model_choice import plan_model, read_model
from weft.engine.weights.quantization import Quantization, Scheme
from weft.engine.weights.reader import ExpertsRef, TensorRef, WeightReader, WeightRef
from weft.engine.wire.messages import EngineOptions

__all__ = ["root"]

BF16 = torch.bfloat16
BASES = {
    "dense": written.BASE,
    "experts": Checkpoint(
        "qwen3_moe", {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8}
    ),
}
WRITE = {
    "gptq": own(written.gptq(4), bits=4, sym=True, **GPTQ),
    "gptq zeros": own(written.gptq(4, symmetric=False), bits=4, sym=False, **GPTQ),
    "gptq order": own(written.gptq(4, ordered=True), bits=4, **(GPTQ | {"desc_act": True})),
    "gptq 8 bits": own(written.gptq(8, size=-1), bits=8, sym=True, **(GPTQ | {"group_size": -1})),
    "nf4": LIBRARIES["nf4"],
    "awq": own(written.awq(), quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm"),
}


@pytest.fixture
def native() -> library.NativeLibrary:
    loaded = library.load()
    if loaded is None:
        pytest.skip("no native kernels on this machine")
    return loaded


@pytest.mark.parametrize(("kind", "name"), [*(("dense", name) for name in WRITE), ("experts", "gptq")])
def test_answers_and_bytes(native: library.NativeLibrary, tmp_path: Path, kind: str, name: str) -> None:
    write_checkpoint(BASES[kind], tmp_path / "base")
    (tmp_path / "quantized").mkdir()
    plain = WRITE[name](tmp_path / "base", folder := tmp_path / "quantized")
    config = load_model_config(folder)
    kernels = CpuKernels(native, quantization=config.quantization)
    reference, prompts = load_reference(plain), make_prompts(40)
    with torch.inference_mode():
        expected = reference(prompts[0][None]).logits[0]
    logits = Runner(folder, kernels, BF16).run(prompts, 40)[0].float()
    of_plain = Runner(plain, CpuKernels(native), BF16).run(prompts, 40)[0].float()
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.998
    assert (logits - expected).norm() < 3 * (of_plain - expected).norm()  # inputs are rounded, too
    spec = decoder_spec(config)
    assert spec.weights_bytes(kernels, BF16) < 0.7 * spec.weights_bytes(CpuKernels(native), BF16)


@pytest.mark.parametrize("name", [*OWN, *LIBRARIES])
def test_the_plan_is_what_matrices_take(native: library.NativeLibrary, root: Path, name: str) -> None:
    folder, _ = checkpoint(root, name)
    config, sizes = load_model_config(folder), []

    class Counted(CpuKernels):
        def _packed(
            self, ref: WeightRef, reader: WeightReader, *, gate: str | None = None
        ) -> NativeLinear | ActOrderLinear:
            built = super()._packed(ref, reader, gate=gate)
            linear = built.inner if isinstance(built, ActOrderLinear) else built
            assert isinstance(linear, NativeLinear)
            taken = sum(tensor.nbytes for tensor in linear.matrix.tensors)
            sizes.append((ref.names, self.linear_bytes(ref, BF16), taken))
            return built

    kernels = Counted(native, quantization=config.quantization)
    load_weights(folder, config, kernels, device=torch.device("cpu"), dtype=BF16, max_model_len=64)
    wrong = [size for size in sizes if not 0.9 < size[1] / size[2] <= 1]  # outputs are packed in panels
    if name == "pack order":  # its config.json does not say that the head is plain
        wrong = wrong[1:]
    assert sizes and not wrong


@pytest.mark.parametrize(("name", "activation"), [("gptq order", "silu"), ("gptq", "relu")])
def test_experts_that_do_not_stay_packed_are_planned_so(
    native: library.NativeLibrary, tmp_path: Path, name: str, activation: str
) -> None:
    """All experts get the same inputs, in one order; and no kernel computes ReLU. They were planned at a quarter."""
    base = Checkpoint("qwen3_moe", dict(BASES["experts"].changes) | {"hidden_act": activation})
    write_checkpoint(base, tmp_path / "base")
    (folder := tmp_path / "quantized").mkdir()
    WRITE[name](tmp_path / "base", folder)
    config, taken = load_model_config(folder), []

    class Counted(CpuKernels):
        def experts(self, gate_up: ExpertsRef, down: ExpertsRef, reader: WeightReader, gating: Gating) -> Experts:
            built = super().experts(gate_up, down, reader, gating)
            if isinstance(built, NativeExperts):
                taken.extend(tensor.nbytes for matrix in built._matrices for tensor in matrix._matrix.tensors)
            else:
                assert isinstance(built, TorchExperts)
                taken.append(built.gate_up.nbytes + built.down.nbytes)
            return built

    kernels, spec = Counted(native, quantization=config.quantization), decoder_spec(config)
    load_weights(folder, config, kernels, device=torch.device("cpu"), dtype=BF16, max_model_len=64)
    assert spec.embedding is not None
    others = sum(kernels.linear_bytes(matrix, BF16) for matrix in spec.matrices) + 2 * spec.embedding.num_values
    others += sum(each.num_bytes(BF16) for each in spec.weights if isinstance(each, TensorRef))
    assert spec.weights_bytes(kernels, BF16) == others + sum(taken)


def test_a_matrix_that_is_scaled_while_it_is_read_is_planned_plain(native: library.NativeLibrary) -> None:
    kernels = CpuKernels(native, quantization=Quantization("gptq", "GPTQ", ((re.compile(""), Scheme(4, 32)),)))
    ref = WeightRef(("m",), (64,), 64)
    assert kernels.linear_bytes(ref, BF16) < kernels.linear_bytes(replace(ref, scales=(0.5,)), BF16) == 64 * 64 * 2


def test_the_plan_of_random_weights_is_that_of_plain_ones(native: library.NativeLibrary, root: Path) -> None:
    folder, plain = checkpoint(root, "gptq")
    options = EngineOptions(model=str(folder), device="cpu", dtype="bfloat16", load_format="dummy", max_model_len=32)
    model, other = read_model(folder, "auto"), read_model(plain, "auto")
    config = engine_config.resolve(options, model)
    assert plan_model(model, config).weights_bytes == plan_model(other, config).weights_bytes
