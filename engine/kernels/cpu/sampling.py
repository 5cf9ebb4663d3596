"""Weft's own `PickIds` for the CPU: a row's steps from mask to id, one after the other, while it is in the cache.

Follows `pick_ids` number by number. Its exponential, and the order of its sums, differ in the last bit, so an id may
differ where a uniform number lies that close to the border between two; a row is sampled alone, bit for bit.
"""

import ctypes

import numpy as np
import torch

from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.step.batch import SamplingBatch
from weft.engine.step.masks import RowMasks

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class NativeSampler:
    """See `PickIds` and `engine/kernels/cpu/sample.c`."""

    def __init__(self, library: NativeLibrary) -> None:
        self._sample = library.function("weft_sample", _POINTER, _SIZE, _SIZE, *[_POINTER] * 8)

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch, masks: RowMasks | None) -> torch.Tensor:
        """Logits (num_rows, vocab_size) float32, contiguous, stay as they are -> (num_rows,) int64."""
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        mask_rows = np.full(len(logits), -1)
        if masks is not None:
            mask_rows[masks.rows] = np.arange(len(masks.rows))
        arrays = (mask_rows, batch.temperatures, batch.top_ks, batch.top_ps, batch.min_ps, batch.uniforms)
        self._sample(
            logits.data_ptr(),
            *logits.shape,
            masks.bits.ctypes.data if masks is not None else None,
            *(array.ctypes.data for array in arrays),
            token_ids.data_ptr(),
        )
        return token_ids
