"""Native recurrent layers for the CPU, which change states in place; they wrap recurrent.c."""

import ctypes

import torch
from torch import Tensor
from typing_extensions import override

from weft.engine.kernels.cpu.layers import NativeLinear, NativeNorm
from weft.engine.kernels.cpu.library import NativeLibrary
from weft.engine.kernels.cpu.packed import Matrix
from weft.engine.layers import recurrence
from weft.engine.layers.block import StateStep
from weft.engine.layers.feed_forward import softplus
from weft.engine.parts.mamba import Mamba2Mixer

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

# Lanes of a vector, and the largest sizes that the kernels have room for.
_LANES, _MAX_SIZE, _MAX_KERNEL = 16, 256, 8


class NativeDeltaRule(recurrence.DeltaRule):
    """Linear attention: the native kernel computes decodes, torch what it cannot compute, and steps with prompts."""

    def __init__(self, library: NativeLibrary) -> None:
        """Take the function of a loaded library."""
        arguments = (*(_POINTER,) * 3, *(_SIZE,) * 4, *(_POINTER,) * 4, _SIZE, _POINTER, _POINTER)
        self._function = library.function("weft_delta_step", *arguments)

    def __call__(self, inputs: recurrence.DeltaInputs, states: StateStep, cache: int) -> Tensor:
        """See `DeltaRule`."""
        num_tokens, num_heads, value_dim = inputs.values.shape
        if num_tokens != states.is_new.size(0) or value_dim % _LANES:
            return recurrence.delta_rule(inputs, states, cache)
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


class _Requests(ctypes.Structure):
    """`Requests` of kernels.h."""

    kept: tuple[object, ...]
    _fields_ = (
        *((name, _POINTER) for name in ("starts", "slots", "is_new")),
        *(("num_requests", _SIZE), ("states", _POINTER)),
    )

    @classmethod
    def of(cls, states: StateStep, cache: int) -> "_Requests":
        """Those of a step."""
        starts, slots, is_new = states.query_start_locs, states.slots(cache), states.is_new
        pointers = starts.ctypes.data, slots.data_ptr(), is_new.data_ptr()
        requests = cls(*pointers, len(slots), states.tensor(cache).data_ptr())
        requests.kept = starts, slots, is_new  # C has bare addresses
        return requests


class _Space(ctypes.Structure):
    """`Space` of kernels.h."""

    _fields_ = (
        *((name, _SIZE) for name in ("num_heads", "head_dim", "state_size", "num_groups")),
        *((name, _POINTER) for name in ("decays", "skips", "time_bias")),
        *((name, _FLOAT) for name in ("time_scale", "least_time", "largest_time", "gate_scale")),
    )


class NativeConvolution(recurrence.CausalConvolution):
    """A convolution of bfloat16 inputs."""

    def __init__(self, library: NativeLibrary, weight: Tensor, bias: Tensor | None, *, has_silu: bool) -> None:
        """See `CausalConvolution`; `supports` must hold."""
        super().__init__(weight, bias, has_silu=has_silu)
        bias_pointer = None if self.bias is None else self.bias.data_ptr()
        self.parameters = (*weight.shape, self.taps.data_ptr(), bias_pointer, has_silu)
        arguments = (_POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER)
        self._function = library.function("weft_convolve", *arguments)

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Whether the kernel can compute a convolution with this weight (channels, kernel)."""
        return weight.size(0) % _LANES == 0 and 2 <= weight.size(1) <= _MAX_KERNEL

    @override
    def step(self, inputs: Tensor, states: StateStep, cache: int) -> Tensor:
        outputs = torch.empty(inputs.shape, dtype=torch.bfloat16)
        requests, first = ctypes.byref(_Requests.of(states, cache)), (inputs.data_ptr(), inputs.stride(0))
        self._function(requests, *first, *self.parameters, outputs.data_ptr())
        return outputs


class NativeStateSpaceScan(recurrence.StateSpaceScan):
    """A state space over bfloat16 inputs."""

    def __init__(self, library: NativeLibrary, space: recurrence.StateSpace) -> None:
        """Compute this one; `supports` must hold."""
        super().__init__(space)
        tensors = (tensor.data_ptr() for tensor in (space.decays, space.skips, space.time_bias))
        sizes = (space.num_heads, space.head_dim, space.state_size, space.num_groups)
        self.described = _Space(*sizes, *tensors, space.time_scale, *space.time_limits, space.gate_scale)
        inputs = (_POINTER, _SIZE) * 3
        self._function = library.function("weft_scan_state_space", _POINTER, _POINTER, *inputs, _POINTER)

    @staticmethod
    def supports(space: recurrence.StateSpace) -> bool:
        """Whether the kernel can compute it."""
        return all(size % _LANES == 0 and size <= _MAX_SIZE for size in (space.head_dim, space.state_size))

    @override
    def __call__(self, channels: Tensor, times: Tensor, gate: Tensor | None, states: StateStep, cache: int) -> Tensor:
        outputs = torch.empty(channels.size(0), self.space.num_heads * self.space.head_dim, dtype=torch.bfloat16)
        requests, space = ctypes.byref(_Requests.of(states, cache)), ctypes.byref(self.described)
        gates = (None, 0) if gate is None else (gate.data_ptr(), gate.stride(0))
        inputs = (channels.data_ptr(), channels.stride(0), times.data_ptr(), times.stride(0), *gates)
        self._function(requests, space, *inputs, outputs.data_ptr())
        return outputs


class NativeSelectiveScan(recurrence.SelectiveScan):
    """A selective scan over bfloat16 inputs."""

    def __init__(self, library: NativeLibrary, decays: Tensor, skips: Tensor, time_bias: Tensor) -> None:
        """See `SelectiveScan`; `supports` must hold."""
        super().__init__(decays, skips, time_bias)
        self._parameters = (*decays.shape, decays.data_ptr(), skips.data_ptr())
        inputs = (_POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE)
        parameters = (_SIZE, _SIZE, _POINTER, _POINTER)
        self._function = library.function("weft_scan_selective", _POINTER, *parameters, *inputs, _POINTER)

    @staticmethod
    def supports(decays: Tensor) -> bool:
        """Whether the kernel can compute a scan with these decays (num_channels, state_size)."""
        return decays.size(0) % _LANES == decays.size(1) % _LANES == 0 and decays.size(1) <= _MAX_SIZE

    @override
    def __call__(
        self, x: Tensor, times: Tensor, selection: tuple[Tensor, Tensor], gate: Tensor, states: StateStep, cache: int
    ) -> Tensor:
        outputs = torch.empty(x.shape, dtype=torch.bfloat16)
        steps = softplus(times.float() + self.time_bias)
        b, c = selection
        assert b.stride() == c.stride()
        inputs = (x.data_ptr(), x.stride(0), steps.data_ptr(), b.data_ptr(), c.data_ptr(), b.stride(0))
        requests = ctypes.byref(_Requests.of(states, cache))
        self._function(requests, *self._parameters, *inputs, gate.data_ptr(), gate.stride(0), outputs.data_ptr())
        return outputs


class NativeMamba(ctypes.Structure):
    """`Mamba` of stack.c; has bare addresses."""

    _fields_ = (
        *(("inputs", Matrix), ("output", Matrix)),
        *((name, _SIZE) for name in ("channels", "kernel")),
        *((name, _POINTER) for name in ("taps", "bias")),
        *(("has_silu", _SIZE), ("space", _POINTER), ("norm", _POINTER), ("norm_eps", ctypes.c_double)),
        *((name, _Requests) for name in ("convolved", "scanned")),
    )

    @classmethod
    def of(cls, mixer: Mamba2Mixer) -> "NativeMamba | None":
        """None if a part of the mixer is not native."""
        match mixer:
            case Mamba2Mixer(
                NativeLinear() as inputs,
                _,
                NativeConvolution() as convolution,
                NativeStateSpaceScan() as scan,
                (NativeNorm() | None) as norm,
                NativeLinear() as output,
            ):
                matrices = inputs.described(), output.described()
                norms = (norm.weight.data_ptr(), norm.eps) if norm else (None, 0.0)
                return cls(*matrices, *convolution.parameters, ctypes.addressof(scan.described), *norms)
        return None

    def begin(self, states: StateStep, cache: int) -> object:
        """Point to the states of a step; returns what must be kept until the step is computed."""
        kept = self.convolved, self.scanned = _Requests.of(states, cache), _Requests.of(states, cache + 1)
        return kept
