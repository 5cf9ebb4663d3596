"""ModelOpt of NVIDIA: fp8 with scales of matrices or outputs, and NVFP4.

NVFP4 has pairs of values (out_features, in_features / 2), a scale in fp8 of each 16 inputs, and `weight_scale_2`, a
factor of all of them (github.com/NVIDIA/TensorRT-Model-Optimizer, `torch/quantization/qtensor/nvfp4_tensor.py`).
"""

from weft.engine.weights import fp8
from weft.engine.weights.groups import Groups, fp4_groups
from weft.engine.weights.stored import StoredWeight


def decode(weight: StoredWeight) -> Groups | None:
    """The weight; None if it is not quantized."""
    name, (outputs, inputs) = weight.name, weight.shape
    if not weight.has(f"{name}_scale"):
        return None
    scheme = weight.scheme
    if scheme.bits == 8:
        return fp8.decode(weight)
    scales = weight.scales(f"{name}_scale", scheme) * weight.take(f"{name}_scale_2").float().reshape(1, 1)
    return fp4_groups(weight.take(name, outputs, inputs // 2), scales, scheme.group_size or inputs)
