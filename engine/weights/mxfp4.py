"""Experts in MXFP4, as gpt-oss has them: `blocks` (experts, outputs, inputs / 32, 16) and `scales` without the last."""

from weft.engine.weights.groups import Groups, e8m0, fp4_groups
from weft.engine.weights.stored import StoredWeight


def decode(weight: StoredWeight) -> Groups | None:
    """The weight; None if it is not quantized."""
    if not weight.has(f"{weight.name}_blocks"):
        return None
    outputs, inputs = weight.shape
    blocks = weight.take(f"{weight.name}_blocks", outputs, inputs // 32, 16)
    scales = weight.take(f"{weight.name}_scales", outputs, inputs // 32)
    return fp4_groups(blocks.flatten(1), e8m0(scales), 32)
