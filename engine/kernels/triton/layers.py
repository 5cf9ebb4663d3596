"""Layers of a model for CUDA in Triton: norm, activation, and matrices that multiply a few rows by Weft's own kernel.

Norm and activation have no matrix and are one launch each. `FewRowsLinear` leaves more than a few rows to cuBLAS. Its
sums have another order than those of cuBLAS, so it is not for `--deterministic`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
import triton
from torch import Tensor
from typing_extensions import override

from weft.engine.kernels.torch.layer_kernels import CublasLinear
from weft.engine.kernels.triton import layers_jit as kernels
from weft.engine.kernels.triton.layers_jit import launch_options
from weft.engine.layers.block import Attention, Block, GatedFeedForward, PreNormBlock, unchanged


class TritonNorm:
    """RMSNorm of rows."""

    def __init__(self, weight: Tensor, eps: float, is_dependent: bool) -> None:
        """Take weight (size,), in the dtype of the hidden states or float32; for is_dependent see `launch_options`."""
        self.weight = weight
        self.eps = eps
        self._block = triton.next_power_of_2(len(weight))
        self._num_warps = min(max(self._block // 512, 1), 16)
        self._options = launch_options(is_dependent)

    def __call__(self, hidden: Tensor) -> Tensor:
        """(num_rows, size) -> the same shape and dtype."""
        num_rows, size = hidden.shape
        outputs = hidden.new_empty(num_rows, size)
        kernels.rms_norm[(num_rows,)](
            *(hidden, self.weight, outputs, size, hidden.stride(0), self.eps, self._block),
            num_warps=self._num_warps,
            **self._options,
        )
        return outputs


OWN_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""Activations that the kernels know, by their names in config.json."""

_ACTIVATION_BLOCK = 1024


class GatedActivation:
    """activation(gate) * up."""

    def __init__(self, activation: str, is_dependent: bool) -> None:
        """Take one of `OWN_ACTIVATIONS`; for is_dependent see `launch_options`."""
        self.name = activation
        self._options = launch_options(is_dependent)

    def __call__(self, values: Tensor) -> Tensor:
        """(num_rows, 2 * size), gate first -> (num_rows, size)."""
        num_rows, size = values.size(0), values.size(1) // 2
        outputs = values.new_empty(num_rows, size)
        grid = (num_rows, triton.cdiv(size, _ACTIVATION_BLOCK))
        kernels.activate[grid](values, outputs, size, self.name, _ACTIVATION_BLOCK, num_warps=4, **self._options)
        return outputs


MAX_ROWS = 8
"""Most rows that the kernel of `FewRowsLinear` takes."""

# One or two rows are multiplied in float32 by ordinary instructions. For more these would take longer than the weights.
_MOST_WITHOUT_DOT = 2

_NUM_WARPS = 4


class FewRowsLinear(CublasLinear):
    """A matrix that may begin with the norm of its inputs, for few rows in one launch.

    Decoding at a small batch reads all weights for a few rows. The kernel loads weights while the kernel before it
    still runs (see `layers_jit`), and does what stands between two matrices in the same launch: norm, activation,
    residual.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, max_rows: int, is_dependent: bool, norm: TritonNorm | None = None
    ) -> None:
        """Take the matrix.

        Args:
            weight: (out_features, in_features). cuBLAS takes all products if the kernel does not support it.
            bias: (out_features,); None if there is none.
            max_rows: Most rows for the kernel, MAX_ROWS at most.
            is_dependent: See `launch_options`.
            norm: Comes before the matrix.
        """
        super().__init__(weight, bias)
        assert max_rows <= MAX_ROWS, "the kernel has no more rows"
        self._max_rows = max_rows if supports(weight) else 0
        self._is_dependent = is_dependent
        self._norm = norm

    @override
    def __call__(self, inputs: Tensor) -> Tensor:
        if not self.takes(inputs):
            return super().__call__(self._normed(inputs))
        return self.multiply(inputs, inputs.new_empty(len(inputs), len(self.weight)))

    @override
    def add_to(self, residual: Tensor, inputs: Tensor) -> None:
        if self.takes(inputs):
            self.multiply(inputs, residual, adds=True)
        else:
            super().add_to(residual, self._normed(inputs))

    @override
    def to_float32(self, inputs: Tensor) -> Tensor:
        if not self.takes(inputs):
            return super().to_float32(self._normed(inputs))
        return self.multiply(inputs, inputs.new_empty(len(inputs), len(self.weight), dtype=torch.float32))

    def after(self, norm: TritonNorm) -> "FewRowsLinear | None":
        """The same matrix with the norm before it; None if that has to stay a launch of its own.

        The kernel multiplies inputs by the weights of the norm before it knows their scale, which may overflow float16.
        """
        if not self._max_rows or self.weight.dtype == torch.float16:
            return None
        return FewRowsLinear(self.weight, self.bias, self._max_rows, self._is_dependent, norm)

    def takes(self, inputs: Tensor) -> bool:
        """Whether the kernel multiplies these inputs (num_rows, in_features)."""
        return 0 < inputs.size(0) <= self._max_rows and inputs.stride(1) == 1

    def multiply(self, inputs: Tensor, outputs: Tensor, *, activation: str = "", adds: bool = False) -> Tensor:
        """Launch `layers_jit.multiply` for inputs that `takes` accepts; returns outputs."""
        (num_rows, columns), num_outs = inputs.shape, outputs.size(1)
        uses_dot = num_rows > _MOST_WITHOUT_DOT
        outs, block = (16, 512) if uses_dot else (8, 1024)
        norm, bias = self._norm, self.bias
        kernels.multiply[(triton.cdiv(num_outs, outs // 2 if activation else outs),)](
            *(inputs, self.weight, inputs if bias is None else bias, norm.weight if norm else inputs, outputs),
            *(num_rows, num_outs, inputs.stride(0), outputs.stride(0), norm.eps if norm else 0.0),
            HAS_BIAS=bias is not None,
            HAS_NORM=norm is not None,
            ADDS=adds,
            ACTIVATION=activation,
            COLUMNS=columns,
            ROWS=MAX_ROWS if uses_dot else num_rows,
            OUTS=outs,
            BLOCK=block,
            USES_DOT=uses_dot,
            PREFETCH=self._num_prefetched(num_outs, outs, block),
            num_warps=_NUM_WARPS,
            num_stages=1,  # the kernel has a pipeline of its own
            **launch_options(self._is_dependent),
        )
        return outputs

    def _num_prefetched(self, num_outs: int, outs: int, block: int) -> int:
        """Columns after the first tile to prefetch; all programs together fill half of the L2 cache at most."""
        num_rows, columns = self.weight.shape
        if not self._is_dependent or num_outs < outs:
            return 0
        room = _l2_bytes(self.weight.device) // (2 * self.weight.itemsize * num_rows)
        return max(min(room, columns) - block, 0) // 64 * 64  # whole cache lines

    def _normed(self, inputs: Tensor) -> Tensor:
        return self._norm(inputs) if self._norm else inputs


class FewRowsGated:
    """activation(gate(x)) * up(x), for few rows in one launch."""

    def __init__(self, gate_up: FewRowsLinear, activate: GatedActivation) -> None:
        """Take both projections, gate first."""
        self._gate_up = gate_up
        self._activate = activate

    def __call__(self, hidden: Tensor) -> Tensor:
        """(num_tokens, hidden_size) -> (num_tokens, intermediate_size)."""
        gate_up = self._gate_up
        if not gate_up.takes(hidden):
            return self._activate(gate_up(hidden))
        outputs = hidden.new_empty(len(hidden), len(gate_up.weight) // 2)
        return gate_up.multiply(hidden, outputs, activation=self._activate.name)

    def sums(self, hidden: Tensor) -> Tensor:
        """See `Activated`."""
        return self._gate_up(hidden)

    def activate(self, sums: Tensor) -> Tensor:
        """See `Activated`."""
        return self._activate(sums)

    def after(self, norm: TritonNorm) -> "FewRowsGated | None":
        """See `FewRowsLinear.after`."""
        gate_up = self._gate_up.after(norm)
        return FewRowsGated(gate_up, self._activate) if gate_up else None


def supports(weight: Tensor) -> bool:
    """Whether `FewRowsLinear` can read weight (out_features, in_features): 16-bit values, each row 16-byte aligned."""
    is_aligned = weight.is_contiguous() and weight.size(1) % 16 == 0 and weight.data_ptr() % 16 == 0
    return is_aligned and weight.dtype in (torch.bfloat16, torch.float16)


def fuse_norms(blocks: Sequence[Block]) -> list[Block]:
    """The same blocks, in which the matrices that follow a norm have taken it over."""
    return [_fuse_norms(block) if isinstance(block, PreNormBlock) else block for block in blocks]


def _fuse_norms(block: PreNormBlock) -> PreNormBlock:
    norm, mixer = block.mixer_norm, block.mixer
    if isinstance(norm, TritonNorm) and isinstance(mixer, Attention) and isinstance(mixer.qkv, FewRowsLinear):
        qkv = mixer.qkv.after(norm)
        if qkv:
            block = replace(block, mixer_norm=unchanged, mixer=replace(mixer, qkv=qkv))
    norm, forward = block.feed_forward_norm, block.feed_forward
    if isinstance(norm, TritonNorm) and isinstance(forward, GatedFeedForward):
        gated = forward.gated.after(norm) if isinstance(forward.gated, FewRowsGated) else None
        if gated:
            block = replace(block, feed_forward_norm=unchanged, feed_forward=replace(forward, gated=gated))
    return block


@cache
def _l2_bytes(device: torch.device) -> int:
    num_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size
    return num_bytes
