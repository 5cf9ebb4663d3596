"""Linear attention with steps of one token for each request computed in place; a wrapper of delta.c."""

import ctypes

import torch

from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.layers.delta_rule import DeltaInputs, DeltaRule, delta_rule
from weft.engine.layers.step_caches import StateStep

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_LANES = 16


class NativeDeltaRule(DeltaRule):
    """Decodes by the native kernel; by torch what it cannot compute, and steps with prompts."""

    def __init__(self, library: NativeLibrary) -> None:
        """Take the function of a loaded library."""
        arguments = (*(_POINTER,) * 3, *(_SIZE,) * 4, *(_POINTER,) * 4, _SIZE, _POINTER, _POINTER)
        self._function = library.function("weft_delta_step", *arguments)

    def __call__(self, inputs: DeltaInputs, states: StateStep, cache: int) -> torch.Tensor:
        """See `DeltaRule`."""
        num_tokens, num_heads, value_dim = inputs.values.shape
        if num_tokens != states.is_new.size(0) or value_dim % _LANES:
            return delta_rule(inputs, states, cache)
        queries, keys, values, log_decays, rates = (part.contiguous() for part in inputs)
        outputs, decays = torch.empty(num_tokens, num_heads, value_dim), log_decays.exp()
        self._function(
            *(part.data_ptr() for part in (states.tensor(cache), states.slots(cache), states.is_new)),
            *(num_tokens, num_heads, keys.size(-1), value_dim),
            *(part.data_ptr() for part in (queries, keys, values, decays)),
            decays.size(-1),
            rates.data_ptr() or None,
            outputs.data_ptr(),
        )
        return outputs
