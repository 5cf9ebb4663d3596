"""Checkpoints of every quantized form answer as transformers does with the weights that they stand for."""

import importlib.util
import io
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import quantized_checkpoints as written
from tests.checkpoints import load_reference
from tests.engine.layers.test_decoder import Runner, make_prompts
from tests.engine.models.test_cut import put
from weft.engine import config as engine_config
from weft.engine.describe.config import load_model_config
from weft.engine.kernels.torch.layer_kernels import TorchKernels
from weft.engine.models.cut import shard
from weft.engine.models.loading import DecodedSource, load_weights
from weft.engine.parts.decoder import decoder_spec
from weft.engine.start import model_choice, report
from weft.engine.start.model_choice import plan_model, read_model, weights_note
from weft.engine.weights.reader import DenseReader, WeightRef
from weft.engine.weights.tensor_files import CheckpointSource
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions

CPU = torch.device("cpu")
Write = Callable[[Path, Path], Path]


def own(quantize: written.Quantize, **config: object) -> Write:
    return lambda base, folder: written.write(base, folder, config, quantize)


def bits_and_bytes(kind: str, nested: bool = False) -> Write:
    config = {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return lambda base, folder: own(written.bitsandbytes(kind, nested=nested), quant_method="bitsandbytes", **config)(
        base, folder
    )


def torch_ao(kind: str, name: str, **data: object) -> Write:
    quant_type = {"default": {"_type": name, "_version": 2, "_data": data}}
    return own(written.torchao(kind), quant_method="torchao", quant_type=quant_type)


def compressed(activations: object = None, **weights: object) -> Write:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": activations}
    return partial(written.write_compressed, groups={"group_0": group}, ignore=["lm_head"])


def mixed(base: Path, folder: Path) -> Path:
    """By layer, by pattern and by name, with one left as it is."""
    four = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
    groups = {
        "group_0": {"targets": ["re:.*self_attn.*"], "weights": four},
        "group_1": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
        "group_2": {"targets": ["model.layers.1.mlp.up_proj"], "weights": four | {"group_size": 16}},
    }
    return written.write_compressed(base, folder, groups, ["lm_head", "re:.*layers.0.self_attn.o_proj"])


FP8 = {"num_bits": 8, "type": "float"}
DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
STATIC = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
FOUR_BITS = {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"}
PACKED = {"format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": FOUR_BITS}}}
GPTQ = {"quant_method": "gptq", "group_size": 32, "desc_act": False}
PER_GROUP = {"granularity": {"_data": {"group_size": 32}}}
AUTO_ROUND = {"quant_method": "auto-round", "data_type": "int", "group_size": 32}

OWN: dict[str, Write] = {
    "fp8 blocks": own(written.fp8_blocks(32, 64), quant_method="fp8", weight_block_size=[32, 64]),
    "fp8 powers": own(written.fp8_blocks(32, 32, powers=True), quant_method="fp8", weight_block_size=[32, 32]),
    "fp8 static": own(written.fp8_static, quant_method="fp8", activation_scheme="static"),
    "fp8 outputs": own(written.fp8_blocks(1, 999, "weight_scale"), quant_method="fbgemm_fp8"),
    "gptq": own(written.gptq(4), bits=4, sym=True, **GPTQ),
    "gptq 8 bits": own(written.gptq(8, size=-1), bits=8, **(GPTQ | {"group_size": -1})),
    "gptq zeros": own(written.gptq(4, symmetric=False), bits=4, sym=False, **GPTQ),
    "gptq 8 zeros": own(written.gptq(8, symmetric=False), bits=8, sym=False, **GPTQ),
    "gptq order": own(written.gptq(4, ordered=True), bits=4, **(GPTQ | {"desc_act": True})),
    "gptq_v2": own(written.gptq(4, symmetric=False, version=2), bits=4, checkpoint_format="gptq_v2", **GPTQ),
    "awq": own(written.awq(), quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm"),
    "auto-round": own(written.gptq(4), bits=4, packing_format="auto_round:auto_gptq", **AUTO_ROUND),
    "modelopt fp8": own(written.fp8_static, quant_method="modelopt", quant_algo="FP8", ignore=["lm_head"]),
    "modelopt nvfp4": own(written.modelopt_nvfp4, quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"]),
    "torchao int4": torch_ao("int4", "Int4WeightOnlyConfig", group_size=32, int4_packing_format={"_data": "PLAIN"}),
    "torchao int8": torch_ao("int8", "IntxWeightOnlyConfig", **PER_GROUP, mapping_type={"_data": "ASYMMETRIC"}),
    "torchao fp8": torch_ao("fp8", "Float8WeightOnlyConfig", weight_dtype={"_data": "float8_e4m3fn"}),
    "auto-round awq": own(written.awq(), bits=4, packing_format="auto_round:auto_awq", **AUTO_ROUND),
}
LIBRARIES: dict[str, Write] = {
    "float-quantized": compressed(STATIC, **FP8, strategy="tensor"),
    "float outputs": compressed(DYNAMIC, **FP8, strategy="channel"),
    "float blocks": compressed(DYNAMIC, **FP8, strategy="block", block_structure=[32, 64]),
    "int-quantized": compressed(DYNAMIC | {"type": "int"}, num_bits=8, strategy="channel"),
    "pack-quantized": compressed(num_bits=4, strategy="group", group_size=32),
    "pack zeros": compressed(num_bits=4, strategy="group", group_size=16, symmetric=False),
    "pack 8 bits": compressed(num_bits=8, strategy="channel"),
    "pack order": own(written.packed_in_order, quant_method="compressed-tensors", **PACKED),
    "int zeros": compressed(DYNAMIC | {"type": "int"}, num_bits=8, strategy="channel", symmetric=False),
    "nvfp4": compressed(**NVFP4),
    "mxfp4": compressed(num_bits=4, **MX),
    "mxfp8": compressed(num_bits=8, **MX),
    "mixed": mixed,
    "nf4": bits_and_bytes("nf4"),
    "nf4 nested": bits_and_bytes("nf4", nested=True),
    "fp4": bits_and_bytes("fp4"),
    "int8": bits_and_bytes("int8"),
}


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@cache
def base(root: Path) -> Path:
    return written.write_base(root / "base")


@cache
def checkpoint(root: Path, name: str) -> tuple[Path, Path]:
    """A quantized one and the plain one of the same weights."""
    library = "bitsandbytes" if name in ("nf4", "nf4 nested", "fp4", "int8") else "compressed_tensors"
    if name in LIBRARIES and importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    folder = root / name.replace(" ", "-")
    folder.mkdir()
    return folder, (OWN | LIBRARIES)[name](base(root), folder)


def reader(folder: Path, dtype: torch.dtype = torch.float32) -> DenseReader:
    quantization = load_model_config(folder).quantization
    assert quantization is not None
    return DenseReader(DecodedSource(CheckpointSource(folder, CPU), quantization, CPU), CPU, dtype, 1)


def matrices(folder: Path, rank: int = 0, num_ranks: int = 1) -> list[WeightRef]:
    refs = shard(decoder_spec(load_model_config(folder)), rank, num_ranks).weights
    return [ref for ref in refs if isinstance(ref, WeightRef)]


def compare(folder: Path, plain: Path, length: int = 11) -> None:
    """Logits of a prompt and a greedy answer; sums of float32 in another order are all that may differ."""
    reference, (prompt,) = load_reference(plain), make_prompts(length)
    for _ in range(6):
        with torch.inference_mode():
            expected = reference(prompt[None]).logits[0]
        prompt = torch.cat((prompt, expected[-1:].argmax(-1)))
    logits = Runner(folder).run([prompt[:-1]], 7)[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert torch.equal(logits.argmax(-1)[length - 1 :], prompt[length:])


@pytest.mark.parametrize("name", [*OWN, *LIBRARIES])
def test_answers_are_those_of_the_weights_that_are_meant(root: Path, name: str) -> None:
    compare(*checkpoint(root, name))


@pytest.mark.parametrize("name", [*OWN, *LIBRARIES])
def test_every_matrix_is_exact_and_so_are_its_groups(root: Path, name: str) -> None:
    folder, plain = checkpoint(root, name)
    weights = load_file(plain / "model.safetensors")
    kept = []
    for ref in matrices(folder):
        expected = torch.cat([weights[f"{part}.weight"] for part in ref.names])
        torch.testing.assert_close(reader(folder).dense(ref)[0], expected, atol=0, rtol=1e-6)
        groups = reader(folder).groups(ref)
        if groups is not None:
            kept.append(ref.names[0].removeprefix("model.layers."))
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(groups.dequantize(dtype), reader(folder, dtype).dense(ref)[0])
    parts = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
    apart = {"0.self_attn.o_proj", "1.mlp.gate_proj"} if name == "mixed" else set()  # plain; gate not as up is
    assert set(kept) == {f"{layer}.{part}" for layer in range(2) for part in parts} - apart


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq order", "gptq zeros", "awq", "pack-quantized", "nf4"])
def test_the_parts_of_ranks_are_together_the_whole(root: Path, name: str) -> None:
    """Of 96 inputs in groups of 32 or 64 a rank of two has a group and a half."""
    folder, _ = checkpoint(root, name)
    for whole, *refs in zip(matrices(folder), *(matrices(folder, rank, 2) for rank in range(2)), strict=True):
        expected, parts = reader(folder).dense(whole)[0], [reader(folder).dense(ref)[0] for ref in refs]
        joined = torch.full_like(expected, torch.nan)
        for ref, part in zip(refs, parts, strict=True):
            put(ref, part, joined)
        assert torch.equal(joined, expected)
        groups = [reader(folder).groups(ref) for ref in refs]
        for part, found in zip(parts, groups, strict=True):
            assert found is None or torch.equal(found.dequantize(torch.float32), part)
        assert (groups[0] is None) == (reader(folder).groups(whole) is None)


Change = Callable[[written.Tensors], object]
DOWN = "model.layers.0.mlp.down_proj"


def spoil(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({f"{DOWN}.{name}": change(tensors[f"{DOWN}.{name}"])})


@pytest.mark.parametrize(
    ("name", "change", "config", "fault"),
    [
        ("gptq", lambda t: t.pop(f"{DOWN}.scales"), {}, rf"tensor {DOWN}.scales is missing from the checkpoint"),
        ("gptq", lambda t: t.pop(f"{DOWN}.qweight"), {}, rf"tensor {DOWN}.weight is missing from the checkpoint"),
        ("gptq", spoil("scales", lambda t: t[:2]), {}, rf"{DOWN}.scales has shape \[2, 64\], .* asks for \[3, 64\]"),
        ("gptq", lambda t: None, {"group_size": 16}, r"qzeros has shape \[2, 16\], .* asks for \[4, 16\]"),
        ("gptq", lambda t: None, {"bits": 8}, r"qweight has shape \[8, 128\], .* asks for \[16, 128\]"),
        ("gptq", spoil("g_idx", lambda t: t + 1), {}, rf"{DOWN}.g_idx names groups outside of 0 to 2"),
        ("gptq", spoil("scales", lambda t: t * float("nan")), {}, rf"tensor {DOWN}.scales holds .* not numbers"),
        ("gptq", lambda t: t.update({"model.more.qweight": torch.ones(1)}), {}, "model.more.qweight .* no place"),
        ("gptq", lambda t: t.update({f"{DOWN}.bias": torch.ones(64)}), {}, rf"tensor {DOWN}.bias .* has no place"),
        ("awq", spoil("qzeros", lambda t: t[1:]), {}, rf"{DOWN}.qzeros has shape \[2, 8\], .* asks for \[3, 8\]"),
        (
            "fp8 static",
            lambda t: t.pop(f"{DOWN}.weight_scale"),
            {},
            rf"{DOWN}.weight holds float8_e4m3fn .* scales",
        ),
        (
            "fp8 static",
            lambda t: None,
            {"weight_block_size": [32, 32]},
            r"_scale has shape \[\], .* for \[4, 2\]",
        ),
        ("fp8 blocks", spoil("weight", lambda t: t.view(torch.uint8).fill_(127).view(t.dtype)), {}, "not numbers"),
    ],
)
def test_faults_name_the_tensor(
    root: Path, tmp_path: Path, name: str, change: Change, config: dict[str, object], fault: str
) -> None:
    folder, _ = checkpoint(root, name)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] |= config
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=fault):
        load_weights(
            tmp_path, load_model_config(tmp_path), TorchKernels(), device=CPU, dtype=torch.float32, max_model_len=8
        )


@pytest.mark.parametrize(
    ("name", "options", "note"),
    [
        ("gptq", {}, "stored as W4A16 (GPTQ) and kept in float32"),
        ("gptq", {"dtype": "bfloat16", "quantization": "int8"}, "stored as W4A16 (GPTQ) and rounded again, to int8"),
        ("fp8 static", {}, "stored as W8A8 in floating point (fp8; activations are not quantized) and kept in float32"),
    ],
)
def test_the_plan_and_the_log_say_how_weights_are_kept(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    name: str,
    options: dict[str, str],
    note: str,
) -> None:
    folder, plain = checkpoint(root, name)
    given = EngineOptions(**{"model": str(folder), "device": "cpu", "dtype": "float32", "max_model_len": 32, **options})
    facts, other = read_model(folder, "auto"), read_model(plain, "auto")
    config = engine_config.resolve(given, facts)
    planned, plan_of_other = plan_model(facts, config), plan_model(other, config)
    assert weights_note(facts, config, planned.kernels) == note
    assert weights_note(other, config, planned.kernels) is None
    assert planned.weights_bytes == plan_of_other.weights_bytes
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(msgspec.json.encode(given))))
    assert report.main("plan") == 0
    assert f"weights are  {note}" in capsys.readouterr().out
    with caplog.at_level("INFO"):
        monkeypatch.setattr(model_choice, "load_weights", lambda *args, **options: None)
        plan_model(facts, config).load(folder, lambda done, total: None)
    assert f"weights are {note}" in caplog.messages
