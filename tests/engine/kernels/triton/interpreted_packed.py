"""The checks of packed_parity.py in Triton's interpreter; test_interpreter.py runs this file."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from tests import gguf_files
from tests import quantized_checkpoints as written
from tests.architectures import checkpoints as architectures
from tests.checkpoints import Checkpoint, load_reference, write_checkpoint
from tests.engine.gguf.test_gguf import LARGE, q4_k_m
from tests.engine.kernels.triton import packed_parity as parity
from tests.engine.layers.test_decoder import Runner, make_prompts
from tests.engine.weights.test_quantized import LIBRARIES, OWN, matrices, own, reader
from weft.engine import config as engine_config
from weft.engine.describe.config import load_model_config
from weft.engine.families.experts import Gating
from weft.engine.gguf.folder import made_folder
from weft.engine.kernels import choice as kernel_choice
from weft.engine.kernels.triton import products as packed_layers
from weft.engine.kernels.triton.layer_kernels import TritonKernels
from weft.engine.kernels.triton.packed import PackedMatrix
from weft.engine.kernels.triton.products import PackedLinear
from weft.engine.layers.block import Linear
from weft.engine.layers.wrapped_linear import ActOrderLinear
from weft.engine.models.cut import shard
from weft.engine.parts.decoder import decoder_spec
from weft.engine.start.model_choice import weights_note
from weft.engine.tune import components
from weft.engine.tune import triton_trials as packed_trials
from weft.engine.tune.compare import ChoiceFile, Tuner
from weft.engine.weights.groups import Storage
from weft.engine.weights.quantization import Quantization, Scheme
from weft.engine.weights.reader import ExpertsRef, WeightReader, WeightRef
from weft.engine.wire.machine import KernelChoice
from weft.engine.wire.messages import EngineOptions

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of a sigmoid that is 0


@pytest.mark.parametrize("check", parity.CHECKS)
def test_parity(check: Callable[[torch.device, torch.dtype], None]) -> None:
    """In a dot, Triton's interpreter takes bfloat16 for integers."""
    check(torch.device("cpu"), torch.float16)


FORMS = {
    "gptq": OWN["gptq zeros"],
    "gptq order": OWN["gptq order"],
    "awq": OWN["awq"],
    "compressed-tensors": LIBRARIES["pack-quantized"],
    "fp8": own(written.fp8_blocks(32, 32), quant_method="fp8", weight_block_size=[32, 32]),
}


class Counted(TritonKernels):
    """Notes the matrices that stay packed, and checks that they take what was planned."""

    num_packed = 0

    def _packed(self, ref: WeightRef, reader: WeightReader) -> Linear | None:
        linear = super()._packed(ref, reader)
        inner = linear.inner if isinstance(linear, ActOrderLinear) else linear
        if inner:
            assert isinstance(inner, PackedLinear)
            assert inner.matrix.nbytes == self.linear_bytes(ref, torch.float16)
            self.num_packed += 1
        return linear

    def packed_experts(self, ref: ExpertsRef, reader: WeightReader) -> tuple[PackedMatrix, torch.Tensor | None] | None:
        found = super().packed_experts(ref, reader)
        if found and found[1] is not None:
            assert found[0].nbytes + found[1].nbytes == ref.num_experts * self.linear_bytes(ref.matrix, torch.float16)
            self.num_packed += 1
        return found


def compare(folder: Path, plain: Path, num_packed: int) -> None:
    """Logits are near those of the weights that are meant, in float32."""
    prompts, config = make_prompts(11), load_model_config(folder)
    kernels = Counted(quantization=config.quantization)
    with torch.inference_mode():
        expected = load_reference(plain)(prompts[0][None]).logits[0]
    logits = Runner(folder, kernels, torch.float16).run(prompts, 8)[0].float()
    parity.assert_near(logits, expected.double(), 5e-3)
    assert kernels.num_packed == num_packed


@pytest.mark.parametrize("name", FORMS)
def test_checkpoints_stay_packed(tmp_path: Path, name: str) -> None:
    """In two layers of four matrices each."""
    if name == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    (folder := tmp_path / "own").mkdir()
    compare(folder, FORMS[name](written.write_base(tmp_path / "base"), folder), 8)


def write_gpt_oss(root: Path, size: int) -> Path:
    """Experts of so many inner values, in MXFP4; the weights that are meant are in `plain` of the folder."""
    plain = architectures.write("gpt_oss", root / "base", {"intermediate_size": size})
    (folder := root / "own").mkdir()
    experts = ("experts.gate_up_proj", "experts.down_proj")
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    written.write(plain, folder, config, written.mxfp4, lambda name: name.endswith(experts))
    return folder


def test_experts_of_gpt_oss_stay_packed(tmp_path: Path) -> None:
    folder = write_gpt_oss(tmp_path, 64)
    compare(folder, folder / "plain", 4)


def test_mixtures_of_gguf_files_stay_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layers of four matrices and the head; queries, keys and values are of two types in the first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = Checkpoint("llama", LARGE | {"num_hidden_layers": 2})
    file, plain = gguf_files.write_model(tmp_path / "model", "llama", checkpoint, q4_k_m)
    compare(made_folder(file), plain, 9)


@pytest.mark.parametrize("storage", ["int8", "int4", "fp8"])
def test_plain_checkpoints_are_packed_while_they_are_loaded(tmp_path: Path, storage: Storage) -> None:
    """Of the embedding, which is the head, too, rows are gathered from the packed matrix."""
    tolerance = {"int8": 0.05, "int4": 0.4, "fp8": 0.2}[storage]
    write_checkpoint(Checkpoint("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 1}), tmp_path)
    logits = Runner(tmp_path, TritonKernels(storage=storage), torch.float16).run(prompts := make_prompts(5), 5)[0]
    parity.assert_near(logits, Runner(tmp_path).run(prompts, 5)[0].double(), tolerance)


def test_ranks_have_their_parts(tmp_path: Path) -> None:
    """Of 96 inputs in groups of 32 a rank of two begins inside of a group, on the border of a run, as it is planned."""
    (folder := tmp_path / "own").mkdir()
    OWN["gptq zeros"](written.write_base(tmp_path / "base"), folder)
    kernels = TritonKernels(quantization=load_model_config(folder).quantization)
    for rank in range(2):
        for ref in matrices(folder, rank, 2):
            found = kernels._packed(ref, reader(folder))
            if kernels.packed_form(ref):
                assert isinstance(found, PackedLinear)
                assert found.matrix.nbytes == kernels.linear_bytes(replace(ref, has_bias=False), torch.float16)
                part = reader(folder).dense(ref)[0]
                unpacked = found.matrix.unpack(torch.float32, num_rows=len(part))
                torch.testing.assert_close(unpacked, part, atol=0, rtol=1e-3)


def test_experts_of_ranks_stay_packed(tmp_path: Path) -> None:
    """If a rank began inside of a group, they were dequantized, and took four times the memory that was planned."""
    model = load_model_config(folder := write_gpt_oss(tmp_path, 96))
    kernels = TritonKernels(quantization=model.quantization)
    experts = [ref for ref in shard(decoder_spec(model), 1, 2).weights if isinstance(ref, ExpertsRef)]
    for gate_up, down in zip(experts[::2], experts[1::2], strict=True):
        taken = 0
        for ref in (gate_up, down):
            found = kernels.packed_experts(ref, reader(folder))
            assert found is not None
            taken += sum(part.nbytes for part in found if part is not None)
            weight, _ = next(iter(reader(folder).experts(ref)))
            torch.testing.assert_close(found[0].unpack(torch.float32, num_rows=len(weight)), weight, atol=0, rtol=1e-3)
        assert taken == kernels.experts_bytes(gate_up, down, Gating(), torch.float32)


def test_a_matrix_that_is_scaled_while_it_is_read_is_planned_plain() -> None:
    """No reader has its groups; it was planned at a quarter of what it takes."""
    kernels = TritonKernels(quantization=Quantization("gptq", "GPTQ", ((re.compile(""), Scheme(4, 32)),)))
    ref = WeightRef(("m",), (64,), 64)
    assert (
        kernels.linear_bytes(ref, torch.float16)
        < kernels.linear_bytes(replace(ref, scales=(0.5,)), torch.float16)
        == 8192
    )


def test_parts_begin_at_multiples_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their outputs began between multiples of 16 bytes, which cuBLAS has no fast kernels for."""
    matrix, groups = parity.draw(parity.SCHEMES["int4"], torch.device("cpu"), 150)
    monkeypatch.setattr(packed_layers, "_PART_BYTES", 100 * 2 * parity.COLUMNS)
    unpack, firsts = PackedMatrix.unpack, list[int]()

    def note(self: PackedMatrix, dtype: torch.dtype, *, first: int, num_rows: int) -> torch.Tensor:
        firsts.append(first)
        return unpack(self, dtype, first=first, num_rows=num_rows)

    monkeypatch.setattr(PackedMatrix, "unpack", note)
    inputs = torch.randn(257, parity.COLUMNS).half()
    right = inputs.double() @ groups.dequantize(torch.float32).double().T
    parity.assert_near(PackedLinear(matrix, None)(inputs), right, parity.PRECISION[torch.float16])
    assert firsts == [0, 64, 128]


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_products_are_tried_before_they_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    """Those of a checkpoint, with inputs in fp8 and without, and of one that is quantized; a wrong one is torch's."""
    (folder := tmp_path / "own").mkdir()
    plain = OWN["fp8 outputs"](written.write_base(tmp_path / "base"), folder)
    chosen = folder if quantization == "none" else plain
    for function, value in (("has_triton", True), ("has_fp8", True)):
        monkeypatch.setattr(kernel_choice, function, lambda device, value=value: value)
    monkeypatch.setattr(components, "has_triton", lambda device: True)
    monkeypatch.setattr(packed_trials, "_TIMED_ROWS", 66)
    monkeypatch.setattr(components, "_FP8_TOLERANCE", 0.12)  # the interpreter rounds too far, see packed_parity.py
    model = load_model_config(chosen)
    options = EngineOptions(model=str(chosen), device="cpu", dtype="float16")
    config = engine_config.resolve(options, model)
    config = dataclasses.replace(config, options=msgspec.structs.replace(options, quantization=quantization))

    def settle() -> KernelChoice:
        component = components._packed_products("packed_products", model, config)
        assert component is not None
        return Tuner(ChoiceFile(tmp_path / "none", "here"), lambda run: run() and 1.0)._compare(component)[0]

    note = "activations are quantized in products of many rows) and kept so where they lie in groups, else in float16"
    if quantization == "none":
        assert note in str(weights_note(model, config, kernel_choice.choose_kernels(model, config)))
    names = ["triton-fp8", "triton"] if quantization == "none" else ["triton"]
    assert [(verdict.candidate, verdict.fault) for verdict in settle().verdicts] == [(name, "") for name in names]
    multiply = PackedMatrix.multiply
    monkeypatch.setattr(PackedMatrix, "multiply", lambda *args, **more: multiply(*args, **more).mul_(1.5))
    assert settle().chosen == "torch"
