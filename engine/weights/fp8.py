"""Weights in fp8 with scales of blocks, outputs or whole matrices: DeepSeek, Qwen3-FP8, AutoFP8, FBGEMM.

Scales of activations (`input_scale`) are for kernels that quantize activations, which Weft does not.
"""

from weft.engine.weights.groups import Groups
from weft.engine.weights.stored import StoredWeight


def decode(weight: StoredWeight) -> Groups | None:
    """The weight; None if it is not quantized."""
    names = [weight.name + ending for ending in ("_scale_inv", "_scale") if weight.has(weight.name + ending)]
    if not names:
        return None
    scales = weight.scales(names[0], weight.scheme)
    return weight.groups(weight.take(weight.name, *weight.shape), scales)
