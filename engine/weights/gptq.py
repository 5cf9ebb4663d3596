"""GPTQ, as AutoGPTQ, GPTQModel and AutoRound write it.

Layout: `qweight` (in_features * bits / 32, out_features) packs inputs, `qzeros` (groups, out_features * bits / 32)
packs outputs, `scales` is (groups, out_features), `g_idx` has the group of each input. Zero points of the first format
are stored less one (github.com/ModelCloud/GPTQModel, `convert_gptq_v1_to_v2_format`).
"""

from dataclasses import replace

from weft.engine.weights.groups import Groups, centred, unpack
from weft.engine.weights.stored import StoredWeight


def decode(weight: StoredWeight) -> Groups | None:
    """The weight; None if it is not quantized."""
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
