"""AWQ in the layout of AutoAWQ's GEMM kernel.

`qweight` (in_features, out_features / 8) and `qzeros` (groups, out_features / 8) pack outputs, of each eight first the
even ones (github.com/casper-hansen/AutoAWQ, `awq/modules/linear/gemm.py`); `scales` is (groups, out_features).
"""

import torch

from weft.engine.weights.groups import Groups, centred, unpack
from weft.engine.weights.stored import StoredWeight

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def decode(weight: StoredWeight) -> Groups | None:
    """The weight; None if it is not quantized."""
    module, (outputs, inputs) = weight.module, weight.shape
    if not weight.has(f"{module}.qweight"):
        return None
    num_groups = -(-inputs // (weight.scheme.group_size or inputs))
    values = _unpack(weight.take(f"{module}.qweight", inputs, outputs // 8))
    zeros = None
    if weight.has(f"{module}.qzeros"):
        zeros = _unpack(weight.take(f"{module}.qzeros", num_groups, outputs // 8)).float()
    scales = weight.take(f"{module}.scales", num_groups, outputs).T.float()
    return weight.groups(values, scales, zeros)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """By outputs."""
    values = unpack(words, 4).view(len(words), -1, 8)[..., _PLACES].flatten(1)
    return centred(values, 4).T
