"""bitsandbytes: 4-bit values of a table (NF4, FP4) with scales of blocks that may be quantized themselves, and int8.

Layouts: github.com/bitsandbytes-foundation/bitsandbytes, `functional.py` (`QuantState.as_dict`, `dequantize_4bit`).
"""

import json

import torch

from weft.engine.fields import Fields
from weft.engine.shared.errors import ModelError
from weft.engine.weights.groups import Groups
from weft.engine.weights.stored import StoredWeight


def decode(weight: StoredWeight) -> Groups | None:
    """The weight; None if it is not quantized."""
    name, (outputs, inputs) = weight.name, weight.shape
    if weight.has(f"{weight.module}.SCB"):
        scales = weight.take(f"{weight.module}.SCB", outputs)[:, None].float() / 127
        return Groups(weight.take(name, outputs, inputs), scales, None, 8, inputs)
    if not weight.has(f"{name}.absmax"):
        return None
    state = _state(weight)
    size = state.size("blocksize")
    if inputs % size:
        raise ModelError(f"tensor {name}: blocks of {size} values do not divide rows of {inputs}")
    packed = weight.take(name, outputs * inputs // 2, 1)
    table = weight.take(f"{name}.quant_map", 16).float()
    values = table[torch.stack((packed >> 4, packed & 15), -1).int()].view(outputs, inputs)  # the first in high bits
    return Groups(values, _absmax(weight, state, size).view(outputs, -1), None, 4, size)


def _state(weight: StoredWeight) -> Fields:
    names = [f"{weight.name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
    name = next(filter(weight.has, names), names[0])
    try:
        return Fields(json.loads(bytes(weight.take(name).tolist())), f"tensor {name}")
    except (ValueError, TypeError):
        raise ModelError(f"tensor {name} is no JSON") from None


def _absmax(weight: StoredWeight, state: Fields, size: int) -> torch.Tensor:
    name, (outputs, inputs) = weight.name, weight.shape
    absmax = weight.take(f"{name}.absmax", outputs * inputs // size)
    if not weight.has(f"{name}.nested_absmax"):
        return absmax.float()
    block = state.size("nested_blocksize")
    scales = weight.take(f"{name}.nested_absmax", -(-len(absmax) // block)).float()
    table = weight.take(f"{name}.nested_quant_map", 256).float()
    return table[absmax.int()] * scales.repeat_interleave(block)[: len(absmax)] + state.number("nested_offset")
