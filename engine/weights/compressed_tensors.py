"""compressed-tensors, as LLM Compressor writes it: integers plain and packed, fp8, NVFP4, MXFP4, MXFP8.

Layouts: github.com/vllm-project/compressed-tensors, `compressors`. A config.json may mix them by layer.
"""

from dataclasses import replace

import torch

from weft.engine.shared.errors import ModelError
from weft.engine.weights.groups import Groups, centred, fp4_groups, unpack
from weft.engine.weights.stored import StoredWeight


def decode(weight: StoredWeight) -> Groups | None:
    """The weight; None if it is not quantized."""
    name = weight.name
    if not weight.has(f"{name}_packed"):
        return _plain(weight) if weight.has(f"{name}_scale") else None
    if not weight.scheme.is_float:
        return _packed_integers(weight)
    if weight.has(f"{name}_zero_point"):
        raise ModelError(f"tensor {name}_zero_point: 4-bit floats with zero points are not supported")
    outputs, inputs = weight.shape
    packed = weight.take(f"{name}_packed", outputs, inputs // 2)
    scales = weight.scales(f"{name}_scale", weight.scheme)
    if weight.has(f"{name}_global_scale"):
        scales = scales / weight.take(f"{name}_global_scale").float().reshape(1, 1)
    return fp4_groups(packed, scales, weight.scheme.group_size or inputs)


def _plain(weight: StoredWeight) -> Groups:
    values, name, scheme = weight.take(weight.name, *weight.shape), f"{weight.name}_zero_point", weight.scheme
    zeros = weight.scales(name, scheme) if weight.has(name) else None
    return weight.groups(values, weight.scales(f"{weight.name}_scale", scheme), zeros)


def _packed_integers(weight: StoredWeight) -> Groups:
    name, scheme, (outputs, inputs) = weight.name, weight.scheme, weight.shape
    shape = tuple(weight.take(f"{name}_shape", 2).tolist())
    if shape != weight.shape:
        raise ModelError(f"tensor {name}_shape says {list(shape)}, config.json asks for {list(weight.shape)}")
    packed = weight.take(f"{name}_packed", outputs, -(-inputs * scheme.bits // 32))
    values = centred(unpack(packed, scheme.bits)[:, :inputs], scheme.bits)
    scales, zeros = weight.scales(f"{name}_scale", scheme), None
    if weight.has(f"{name}_zero_point"):
        zeros = _zeros(weight, scales.shape[1])
    groups = weight.groups(values, scales, zeros)
    return replace(groups, group_of=weight.group_of(f"{name}_g_idx", scales.shape[1]))


def _zeros(weight: StoredWeight, num_groups: int) -> torch.Tensor:
    """Packed along the outputs; older files have them as they are."""
    name, bits, outputs = f"{weight.name}_zero_point", weight.scheme.bits, weight.shape[0]
    stored = weight.take(name)
    if stored.dtype == torch.int32:
        stored = weight.take(name, -(-outputs * bits // 32), num_groups)
        stored = centred(unpack(stored.T, bits)[:, :outputs].T, bits)
    return weight.scales(name, weight.scheme, stored)
