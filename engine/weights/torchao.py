"""torchao in safetensors, as transformers 5 writes it: each tensor subclass as plain tensors, read without the library.

A weight `up.weight` is `up._weight_qdata`, `_scale` and `_zero_point` (github.com/pytorch/ao, `prototype/safetensors`).
"""

from weft.engine.weights.groups import Groups, centred, unpack
from weft.engine.weights.stored import StoredWeight


def decode(weight: StoredWeight) -> Groups | None:
    """The weight; None if it is not quantized."""
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
