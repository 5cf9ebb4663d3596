"""Decodes the weights of quantized checkpoints: one function for each method of quantization.

Each takes the tensors that a checkpoint has in place of one weight, and returns values and scales as `Groups`; None if
the checkpoint has the weight as it is. `engine/models/loading.py` picks one by `Quantization.method`. Formats are read
without their libraries. Scales of activations (`input_scale`) are left alone: they are for kernels that quantize
activations, which Weft does not.
"""

import json
from dataclasses import dataclass, replace

import torch

from weft.engine.fields import Fields
from weft.engine.weights.groups import Groups, centred, e8m0, fp4_groups, unpack
from weft.engine.weights.quantization import Quantization, Scheme
from weft.engine.weights.tensor_files import CheckpointSource, misshapen
from weft.engine.wire.errors import ModelError

_ENDINGS = (".weight", ".weight_packed", ".qweight", "._weight_qdata")
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The tensors that a quantized checkpoint has in place of one weight. Every one that is taken counts as used.

    Attributes:
        name: Of the weight, as it would be called if it were not quantized.
        shape: Its outputs and inputs.
        item: Which of how many, if the tensors hold several weights along their first dimension.
    """

    checkpoint: CheckpointSource
    quantization: Quantization
    device: torch.device
    name: str
    shape: tuple[int, int]
    item: tuple[int, int] | None = None

    @property
    def module(self) -> str:
        """Name without `.weight`."""
        return self.name.removesuffix(".weight")

    @property
    def scheme(self) -> Scheme:
        """How the weight is stored; config.json names modules as the files do."""
        names = (self.checkpoint.name_in_files(self.module + ending) for ending in _ENDINGS)
        return self.quantization.scheme(next((name.rpartition(".")[0] for name in names if name), self.module))

    def has(self, name: str) -> bool:
        """Whether the checkpoint has such a tensor."""
        return self.checkpoint.has(name)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor on the device, or the item of it; raises ModelError if it has another shape, if one is given."""
        tensor = self.checkpoint.take(name)
        if self.item:
            index, count = self.item
            if not tensor.dim() or len(tensor) != count:
                raise misshapen(name, tensor, (count, *shape))
            tensor = tensor[index]
        if shape and tensor.shape != shape:
            raise misshapen(name, tensor, shape)
        return tensor.to(self.device)

    def scales(self, name: str, scheme: Scheme, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """Scales or zero points as (out_features, number of groups), in float32, of the name or of the tensor.

        Bytes are exponents, as the microscaling formats have them.
        """
        (outputs, inputs), (rows, columns) = self.shape, scheme.block or (1, scheme.group_size or self.shape[1])
        given = self.take(name) if tensor is None else tensor
        values = e8m0(given) if given.dtype in _EXPONENTS else given.float()
        if scheme.block is None and scheme.group_size is None and values.numel() == 1:
            return values.reshape(1, 1).expand(outputs, 1)
        expected = (-(-outputs // rows), -(-inputs // columns))
        if expected[1] == 1 and values.shape == expected[:1]:
            values = values[:, None]
        if values.shape != expected:
            raise misshapen(name, given, expected)
        return values.repeat_interleave(rows, 0)[:outputs] if rows > 1 else values

    def groups(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> Groups:
        """Of values (out_features, in_features); zero points that are all 0 are left out."""
        scheme = self.scheme
        size = scheme.block[1] if scheme.block else scheme.group_size or self.shape[1]
        return Groups(values, scales, zeros if zeros is not None and zeros.any() else None, scheme.bits, size)

    def group_of(self, name: str, num_groups: int) -> torch.Tensor | None:
        """The group of each input; None if they lie one after another."""
        inputs = self.shape[1]
        if not self.has(name):
            return None
        groups = self.take(name, inputs).long()
        if groups.min() == groups.max() == -1:  # unused
            return None
        if groups.min() < 0 or groups.max() >= num_groups:
            raise ModelError(f"tensor {name} names groups outside of 0 to {num_groups - 1}")
        in_order = torch.arange(inputs, device=groups.device) // (self.scheme.group_size or inputs)
        return None if torch.equal(groups, in_order) else groups


def decode_fp8(weight: StoredWeight) -> Groups | None:
    """fp8 with scales of blocks, outputs or whole matrices: DeepSeek, Qwen3-FP8, AutoFP8, FBGEMM."""
    names = [weight.name + ending for ending in ("_scale_inv", "_scale") if weight.has(weight.name + ending)]
    if not names:
        return None
    scales = weight.scales(names[0], weight.scheme)
    return weight.groups(weight.take(weight.name, *weight.shape), scales)


def decode_modelopt(weight: StoredWeight) -> Groups | None:
    """ModelOpt of NVIDIA: fp8 with scales of matrices or outputs, and NVFP4.

    NVFP4 has pairs of values (out_features, in_features / 2), a scale in fp8 of each 16 inputs, and `weight_scale_2`, a
    factor of all of them (github.com/NVIDIA/TensorRT-Model-Optimizer, `torch/quantization/qtensor/nvfp4_tensor.py`).
    """
    name, (outputs, inputs) = weight.name, weight.shape
    if not weight.has(f"{name}_scale"):
        return None
    scheme = weight.scheme
    if scheme.bits == 8:
        return decode_fp8(weight)
    scales = weight.scales(f"{name}_scale", scheme) * weight.take(f"{name}_scale_2").float().reshape(1, 1)
    return fp4_groups(weight.take(name, outputs, inputs // 2), scales, scheme.group_size or inputs)


def decode_compressed_tensors(weight: StoredWeight) -> Groups | None:
    """compressed-tensors, as LLM Compressor writes it: integers plain and packed, fp8, NVFP4, MXFP4, MXFP8.

    Layouts: github.com/vllm-project/compressed-tensors, `compressors`. A config.json may mix them by layer.
    """
    name = weight.name
    if not weight.has(f"{name}_packed"):
        return _unpacked_compressed(weight) if weight.has(f"{name}_scale") else None
    if not weight.scheme.is_float:
        return _packed_compressed(weight)
    if weight.has(f"{name}_zero_point"):
        raise ModelError(f"tensor {name}_zero_point: 4-bit floats with zero points are not supported")
    outputs, inputs = weight.shape
    packed = weight.take(f"{name}_packed", outputs, inputs // 2)
    scales = weight.scales(f"{name}_scale", weight.scheme)
    if weight.has(f"{name}_global_scale"):
        scales = scales / weight.take(f"{name}_global_scale").float().reshape(1, 1)
    return fp4_groups(packed, scales, weight.scheme.group_size or inputs)


def _unpacked_compressed(weight: StoredWeight) -> Groups:
    values, name, scheme = weight.take(weight.name, *weight.shape), f"{weight.name}_zero_point", weight.scheme
    zeros = weight.scales(name, scheme) if weight.has(name) else None
    return weight.groups(values, weight.scales(f"{weight.name}_scale", scheme), zeros)


def _packed_compressed(weight: StoredWeight) -> Groups:
    name, scheme, (outputs, inputs) = weight.name, weight.scheme, weight.shape
    shape = tuple(weight.take(f"{name}_shape", 2).tolist())
    if shape != weight.shape:
        raise ModelError(f"tensor {name}_shape says {list(shape)}, config.json asks for {list(weight.shape)}")
    packed = weight.take(f"{name}_packed", outputs, -(-inputs * scheme.bits // 32))
    values = centred(unpack(packed, scheme.bits)[:, :inputs], scheme.bits)
    scales, zeros = weight.scales(f"{name}_scale", scheme), None
    if weight.has(f"{name}_zero_point"):
        zeros = _compressed_zeros(weight, scales.shape[1])
    groups = weight.groups(values, scales, zeros)
    return replace(groups, group_of=weight.group_of(f"{name}_g_idx", scales.shape[1]))


def _compressed_zeros(weight: StoredWeight, num_groups: int) -> torch.Tensor:
    """Packed along the outputs; older files have them as they are."""
    name, bits, outputs = f"{weight.name}_zero_point", weight.scheme.bits, weight.shape[0]
    stored = weight.take(name)
    if stored.dtype == torch.int32:
        stored = weight.take(name, -(-outputs * bits // 32), num_groups)
        stored = centred(unpack(stored.T, bits)[:, :outputs].T, bits)
    return weight.scales(name, weight.scheme, stored)


def decode_gptq(weight: StoredWeight) -> Groups | None:
    """GPTQ, as AutoGPTQ, GPTQModel and AutoRound write it.

    `qweight` (in_features * bits / 32, out_features) packs inputs, `qzeros` (groups, out_features * bits / 32) packs
    outputs, `scales` is (groups, out_features), `g_idx` has the group of each input. Zero points of the first format
    are stored less one (github.com/ModelCloud/GPTQModel, `convert_gptq_v1_to_v2_format`).
    """
    module, (outputs, inputs) = weight.module, weight.shape
    if not weight.has(f"{module}.qweight"):
        return None
    bits, size = weight.scheme.bits, weight.scheme.group_size or inputs
    num_groups = -(-inputs // size)
    values = unpack(weight.take(f"{module}.qweight", inputs * bits // 32, outputs).T, bits)
    zeros = unpack(weight.take(f"{module}.qzeros", num_groups, outputs * bits // 32), bits)
    if weight.quantization.zeros_lack_one:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    scales = weight.take(f"{module}.scales", num_groups, outputs).T.float()
    groups = weight.groups(centred(values, bits), scales, centred(zeros, bits).T.float())
    return replace(groups, group_of=weight.group_of(f"{module}.g_idx", num_groups))


_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where each of eight outputs lies in a word."""


def decode_awq(weight: StoredWeight) -> Groups | None:
    """AWQ in the layout of AutoAWQ's GEMM kernel.

    `qweight` (in_features, out_features / 8) and `qzeros` (groups, out_features / 8) pack outputs, of each eight first
    the even ones (github.com/casper-hansen/AutoAWQ, `awq/modules/linear/gemm.py`). `scales` is (groups, out_features).
    """
    module, (outputs, inputs) = weight.module, weight.shape
    if not weight.has(f"{module}.qweight"):
        return None
    num_groups = -(-inputs // (weight.scheme.group_size or inputs))
    values = _unpack_awq(weight.take(f"{module}.qweight", inputs, outputs // 8))
    zeros = None
    if weight.has(f"{module}.qzeros"):
        zeros = _unpack_awq(weight.take(f"{module}.qzeros", num_groups, outputs // 8)).float()
    scales = weight.take(f"{module}.scales", num_groups, outputs).T.float()
    return weight.groups(values, scales, zeros)


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """By outputs."""
    values = unpack(words, 4).view(len(words), -1, 8)[..., _AWQ_PLACES].flatten(1)
    return centred(values, 4).T


def decode_mxfp4(weight: StoredWeight) -> Groups | None:
    """Experts in MXFP4, as gpt-oss has them.

    `blocks` is (experts, outputs, inputs / 32, 16), `scales` is the same without the last dimension.
    """
    if not weight.has(f"{weight.name}_blocks"):
        return None
    outputs, inputs = weight.shape
    blocks = weight.take(f"{weight.name}_blocks", outputs, inputs // 32, 16)
    scales = weight.take(f"{weight.name}_scales", outputs, inputs // 32)
    return fp4_groups(blocks.flatten(1), e8m0(scales), 32)


def decode_bitsandbytes(weight: StoredWeight) -> Groups | None:
    """Values of a table in 4 bits (NF4, FP4), or int8, as bitsandbytes has them.

    Scales of blocks may be quantized themselves. Layouts: github.com/bitsandbytes-foundation/bitsandbytes,
    `functional.py` (`QuantState.as_dict`, `dequantize_4bit`).
    """
    name, (outputs, inputs) = weight.name, weight.shape
    if weight.has(f"{weight.module}.SCB"):
        scales = weight.take(f"{weight.module}.SCB", outputs)[:, None].float() / 127
        return Groups(weight.take(name, outputs, inputs), scales, None, 8, inputs)
    if not weight.has(f"{name}.absmax"):
        return None
    state = _bitsandbytes_state(weight)
    size = state.size("blocksize")
    if inputs % size:
        raise ModelError(f"tensor {name}: blocks of {size} values do not divide rows of {inputs}")
    packed = weight.take(name, outputs * inputs // 2, 1)
    table = weight.take(f"{name}.quant_map", 16).float()
    values = table[torch.stack((packed >> 4, packed & 15), -1).int()].view(outputs, inputs)  # the first in high bits
    return Groups(values, _bitsandbytes_scales(weight, state, size).view(outputs, -1), None, 4, size)


def _bitsandbytes_state(weight: StoredWeight) -> Fields:
    names = [f"{weight.name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
    name = next(filter(weight.has, names), names[0])
    try:
        return Fields(json.loads(bytes(weight.take(name).tolist())), f"tensor {name}")
    except (ValueError, TypeError):
        raise ModelError(f"tensor {name} is no JSON") from None


def _bitsandbytes_scales(weight: StoredWeight, state: Fields, size: int) -> torch.Tensor:
    name, (outputs, inputs) = weight.name, weight.shape
    absmax = weight.take(f"{name}.absmax", outputs * inputs // size)
    if not weight.has(f"{name}.nested_absmax"):
        return absmax.float()
    block = state.size("nested_blocksize")
    scales = weight.take(f"{name}.nested_absmax", -(-len(absmax) // block)).float()
    table = weight.take(f"{name}.nested_quant_map", 256).float()
    return table[absmax.int()] * scales.repeat_interleave(block)[: len(absmax)] + state.number("nested_offset")


def decode_torchao(weight: StoredWeight) -> Groups | None:
    """A tensor subclass of torchao as plain tensors in safetensors, as transformers 5 writes it.

    A weight `up.weight` is `up._weight_qdata`, `_scale` and `_zero_point` (github.com/pytorch/ao,
    `prototype/safetensors`).
    """
    parent, _, leaf = weight.name.rpartition(".")
    qdata, scale, zero_point = (f"{parent}._{leaf}_{part}" for part in ("qdata", "scale", "zero_point"))
    if not weight.has(qdata):
        return None
    (outputs, inputs), scheme = weight.shape, weight.scheme
    if scheme.label != "Int4Tensor":
        zeros = weight.scales(zero_point, scheme) if weight.has(zero_point) else None
        return weight.groups(weight.take(qdata, outputs, inputs), weight.scales(scale, scheme), zeros)
    size = scheme.group_size or inputs
    # Pairs in two's complement, the first in the low bits; the zero point is added to value times scale.
    values = centred(unpack(weight.take(qdata, outputs, inputs // 2), 4) ^ 8, 4)
    scales, added = (weight.take(name, -(-inputs // size), outputs).T.float() for name in (scale, zero_point))
    return Groups(values, scales, None, 4, size, offsets=-added)
