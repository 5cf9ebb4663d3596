"""Applies min-p, top-k and top-p as one floor per row: ids of at least that weight are kept.

A floor is one of the row's own weights, or min-p. So ids that tie are kept or dropped together, and neither the order
of a sort nor the other rows of the batch matter. Sorts whole rows. Weft's own samplers do not.
"""

import numpy as np
import torch
from torch import Tensor

from weft.engine.step.batch import Floats, Ints
from weft.engine.step.transfer import to_device


def weight_floors(weights: Tensor, top_ks: Ints, top_ps: Floats, min_ps: Floats) -> Tensor:
    """The smallest weight that each row's filters keep.

    top-p keeps the fewest ids, by falling weight, that reach top_p of what min-p and top-k leave, and always the most
    probable one. Holtzman et al., "The curious case of neural text degeneration", 2020.

    Args:
        weights: (num_rows, vocab_size) float32; the largest of each row is 1.
        top_ks: (num_rows,) 0 keeps all.
        top_ps: (num_rows,) 1 keeps all.
        min_ps: (num_rows,) 0 keeps all.

    Returns:
        (num_rows, 1) float32.
    """
    device, vocab_size = weights.device, weights.shape[-1]
    last_kept = np.where(top_ks > 0, np.minimum(top_ks, vocab_size), vocab_size) - 1
    top_p = to_device(top_ps, device)[:, None]
    ordered = weights.sort(-1, descending=True).values
    kth = ordered.gather(-1, to_device(last_kept, device)[:, None])
    floors = torch.maximum(kth, to_device(min_ps, device)[:, None])
    masses = (ordered * (ordered >= floors)).cumsum(-1, dtype=torch.float64)
    num_before = (masses < top_p * masses[:, -1:]).sum(-1, keepdim=True)  # ids that do not reach the nucleus' mass
    nucleus = ordered.gather(-1, num_before.clamp(max=vocab_size - 1))
    return torch.where(top_p < 1, torch.maximum(floors, nucleus), floors)
