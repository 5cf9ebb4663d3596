"""Writes tiny quantized checkpoints, each beside a plain one of the weights that its values and scales stand for.

Those of compressed-tensors and bitsandbytes are written by these libraries. Those of fp8, GPTQ, AWQ and MXFP4 are by a
few lines of their own that follow the published layouts, named at each.
"""

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import Checkpoint, load_reference, write_checkpoint

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
"""Name of a module and its weight -> the tensors that stand for it, and the weight that they stand for."""

BASE = Checkpoint("llama", {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "num_hidden_layers": 2})
GROUP = 32


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def write(
    base: Path,
    folder: Path,
    config: Mapping[str, object],
    quantize: Quantize,
    is_quantized: Callable[[str], bool] = is_linear,
) -> Path:
    """Quantize the projections of a checkpoint; returns the folder of the plain one."""
    tensors: Tensors = {}
    plain: Tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        stored, plain[name] = {name: weight}, weight
        if is_quantized(name):
            stored, plain[name] = quantize(name.removesuffix(".weight"), weight)
        tensors = stored | tensors
    return save(base, folder, config, tensors, plain)


def save(base: Path, folder: Path, config: Mapping[str, object], tensors: Tensors, plain: Tensors) -> Path:
    reference = folder / "plain"
    shutil.copytree(base, reference)
    shutil.copy(base / "generation_config.json", folder)
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, reference / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    fields = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return reference


def write_base(folder: Path) -> Path:
    write_checkpoint(BASE, folder)
    return folder


def fp8_blocks(rows: int, columns: int, scale_name: str = "weight_scale_inv", *, powers: bool = False) -> Quantize:
    """A scale for each block, as in github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py (`weight_dequant`).

    Scales that are powers of two are stored as exponents (`scale_fmt` ue8m0).
    """

    def quantize(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        plain, values = torch.empty_like(weight), torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        height, width = weight.shape
        scales = torch.empty(-(-height // rows), -(-width // columns))
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                place = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
                scale = weight[place].abs().max() / 448
                scale = scale.log2().ceil().exp2() if powers else scale
                scales[row, column], values[place] = scale, (weight[place] / scale).to(torch.float8_e4m3fn)
                plain[place] = values[place].float() * scale
        scales = scales.to(torch.float8_e8m0fnu) if powers else scales
        return {f"{module}.weight": values, f"{module}.{scale_name}": scales}, plain

    return quantize


def fp8_static(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale, and one of activations, as in github.com/neuralmagic/AutoFP8."""
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, values.float() * scale


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers along the first dimension into words, lowest bits first, one by one."""
    per_word = 32 // bits
    words = torch.zeros(len(values) // per_word, values.shape[1], dtype=torch.int64)
    for place in range(per_word):
        words |= values[place::per_word].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _integers(
    weight: torch.Tensor, bits: int, size: int, *, symmetric: bool, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned values (outputs, inputs), scales and zeros (outputs, groups) in float16, and the group of each input."""
    inputs = weight.shape[1]
    group_of = torch.arange(inputs) // size
    if order is not None:
        group_of = group_of[order.argsort()]
    num_groups, top = inputs // size, (1 << bits) - 1
    scales, zeros = torch.empty(len(weight), num_groups), torch.full((len(weight), num_groups), 1 << (bits - 1))
    for group in range(num_groups):
        part = weight[:, group_of == group]
        if symmetric:
            scales[:, group] = part.abs().amax(1) / (1 << (bits - 1))
        else:
            scales[:, group] = (part.amax(1) - part.amin(1)) / top
            zeros[:, group] = (-part.amin(1) / scales[:, group]).round().clamp(1, top).int()
    scales = scales.half().float()
    values = ((weight / scales[:, group_of]).round() + zeros[:, group_of]).clamp(0, top).int()
    return values, scales, zeros, group_of


def gptq(bits: int, *, size: int = GROUP, symmetric: bool = True, version: int = 1, ordered: bool = False) -> Quantize:
    """As in github.com/AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py (`pack`)."""

    def quantize(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        width = weight.shape[1] if size == -1 else size
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5)) if ordered else None
        values, scales, zeros, group_of = _integers(weight, bits, width, symmetric=symmetric, order=order)
        plain = scales[:, group_of] * (values - zeros[:, group_of])
        tensors = {
            "qweight": pack(values.T, bits),
            "qzeros": pack(zeros - (1 if version == 1 else 0), bits).T,
            "scales": scales.T.half(),
            "g_idx": group_of.int(),
            "bias": torch.zeros(len(weight)),  # written of every matrix
        }
        return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, plain

    return quantize


def awq(*, symmetric: bool = False) -> Quantize:
    """As in github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py (`from_linear`)."""

    def words(values: torch.Tensor) -> torch.Tensor:
        order = torch.arange(len(values)).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
        return pack(values[order], 4).T

    def quantize(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        values, scales, zeros, group_of = _integers(weight, 4, GROUP, symmetric=symmetric)
        tensors = {"qweight": words(values), "qzeros": words(zeros), "scales": scales.T.half()}
        plain = scales[:, group_of] * (values - zeros[:, group_of])
        return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, plain

    return quantize


def mxfp4(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Experts (experts, inputs, outputs), as in github.com/openai/gpt-oss, gpt_oss/torch/weights.py.

    transformers reads them back.
    """
    from transformers.integrations.mxfp4 import FP4_VALUES, dequantize_convertops

    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / exponents.exp2()[..., None]
    nibbles = (scaled[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).byte()
    blocks, scales = nibbles[..., ::2] | nibbles[..., 1::2] << 4, (exponents + 127).byte()
    plain = dequantize_convertops(blocks, scales, torch.float32).data
    return {f"{module}_blocks": blocks, f"{module}_scales": scales}, plain


def bitsandbytes(kind: str, *, nested: bool = False) -> Quantize:
    """By the library, in blocks of 32 values: rows of tiny models are short."""
    from bitsandbytes import functional

    def quantize(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if kind == "int8":
            values, scales, _ = functional.int8_vectorwise_quant(weight.half())
            tensors = {f"{module}.weight": values, f"{module}.SCB": scales, f"{module}.weight_format": torch.tensor(0)}
            return tensors, functional.int8_vectorwise_dequant(values, scales)
        packed, state = functional.quantize_4bit(weight, None, None, 32, nested, kind)
        tensors = {f"{module}.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        return tensors | {f"{module}.weight": packed}, functional.dequantize_4bit(packed, state)

    return quantize


def modelopt_nvfp4(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As in github.com/NVIDIA/TensorRT-Model-Optimizer, torch/quantization/qtensor/nvfp4_tensor.py."""
    whole = weight.abs().max() / (6 * 448)
    grouped = weight.unflatten(1, (-1, 16))
    scales = (grouped.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    factors = (scales.float() * whole)[..., None]
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = ((grouped / factors).abs()[..., None] - table).abs().argmin(-1)
    plain = (table[codes] * grouped.sign() * factors).flatten(1)
    codes = (codes + 8 * (grouped < 0)).flatten(1).to(torch.uint8)
    tensors = {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": scales,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.5),
    }
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, plain


def torchao(kind: str, *, size: int = GROUP) -> Quantize:
    """As in github.com/pytorch/ao, prototype/safetensors and quantize_/workflows; int4 as mslk packs it."""

    def quantize(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if kind == "fp8":
            tensors, plain = fp8_blocks(1, weight.shape[1])(module, weight)
            values, scales = tensors.values()
            return {f"{module}._weight_qdata": values, f"{module}._weight_scale": scales}, plain
        bits = 4 if kind == "int4" else 8
        values, scales, zeros, group_of = _integers(weight, bits, size, symmetric=False)
        values, zeros = values - (1 << (bits - 1)), zeros - (1 << (bits - 1))
        plain = scales[:, group_of] * (values - zeros[:, group_of])
        qdata, zero_point = values.to(torch.int8), zeros.to(torch.int8)
        if kind == "int4":
            qdata, scales, zero_point = qdata[:, ::2] & 15 | qdata[:, 1::2] << 4, scales.T, (-zeros * scales).T
        tensors = {"qdata": qdata, "scale": scales, "zero_point": zero_point}
        return {f"{module}._weight_{name}": tensor for name, tensor in tensors.items()}, plain

    return quantize


def packed_in_order(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Packed by compressed-tensors, which no longer writes `weight_g_idx` itself."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5))
    values, scales, zeros, group_of = _integers(weight, 4, GROUP, symmetric=True, order=order)
    tensors = {
        "weight_packed": pack_to_int32((values - 8).to(torch.int8), 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
        "weight_g_idx": group_of.int(),
    }
    plain = scales[:, group_of] * (values - zeros[:, group_of])
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, plain


def write_compressed(base: Path, folder: Path, groups: Mapping[str, Mapping[str, object]], ignore: list[str]) -> Path:
    """A whole model by compressed-tensors; scales come from the largest weights."""
    from compressed_tensors.compressors.model_compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model: Any = load_reference(base)
    config = QuantizationConfig(config_groups=copy.deepcopy(dict(groups)), ignore=ignore)
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _calibrate(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    tensors = load_file(folder / "model.safetensors")
    exact = {f"{name}.weight": _nvfp4(module) for name, module in model.named_modules() if _is_nvfp4(module)}
    compressor.decompress_model(model)
    names = load_file(base / "model.safetensors")
    plain = {name: tensor.float() for name, tensor in model.state_dict().items() if name in names} | exact
    written = json.loads((folder / "config.json").read_text())["quantization_config"]
    return save(base, folder, written, tensors, plain)


def _is_nvfp4(module: Any) -> bool:
    return hasattr(module, "weight_global_scale")


def _nvfp4(module: Any) -> torch.Tensor:
    """In float32: `decompress_model` rounds the product of value and scale to bfloat16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    rows, octets = module.weight_packed.shape
    values = unpack_fp4_from_uint8(module.weight_packed, rows, 2 * octets, torch.float32)
    scale, args = module.weight_scale.float(), module.quantization_scheme.weights
    plain: torch.Tensor = dequantize(values, scale, None, args, torch.float32, module.weight_global_scale)
    return plain


def _calibrate(module: Any) -> None:
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args, weight, bound = module.quantization_scheme.weights, module.weight.detach(), None
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        parts = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
    elif args.strategy in ("group", "tensor_group"):
        parts = weight.unflatten(1, (-1, args.group_size))
    else:
        parts = weight.view(1, -1) if args.strategy == "tensor" else weight[:, None]
    if args.strategy == "tensor_group":
        bound = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(bound)
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args, bound)
    module.weight_scale.data.copy_(scale)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero)
    for name in ("input_scale", "input_global_scale"):
        if hasattr(module, name):
            getattr(module, name).data.fill_(1)
