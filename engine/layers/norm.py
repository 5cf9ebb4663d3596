"""Norms, heads whose norms are of another kind than QK-norm before the rotation, and blocks with norms in other places.

Statistics are in float32 for every dtype.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from weft.engine.layers.block import Block, BlockStep, FeedForward, HeadLayer, Layer, Mixer, PagedCache
from weft.engine.layers.rotary import rotate


def normalise(hidden: Tensor, eps: float) -> Tensor:
    """Divide the last dimension of hidden (..., size) by its root mean square; a new tensor of the same dtype."""
    if hidden.is_cuda:
        return F.rms_norm(hidden, hidden.shape[-1:], None, eps)
    # torch has no fused kernel on the CPU. For long prompts its own composition takes three times as long as this one.
    values = hidden.float()
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    scales = norms.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(values, scales).to(hidden.dtype)


class RMSNorm:
    """Normalises the last dimension of hidden (..., size), then multiplies by weight (Zhang and Sennrich, 2019)."""

    def __init__(self, weight: Tensor | None, eps: float) -> None:
        """Take a weight (size,), or any that broadcasts to hidden; None leaves the factor out."""
        self.weight = weight
        self.eps = eps

    def __call__(self, hidden: Tensor) -> Tensor:
        """Same shape and dtype as hidden."""
        normed = normalise(hidden, self.eps)
        return normed if self.weight is None else normed.mul_(self.weight)


class LayerNorm:
    """Subtracts the mean of the last dimension of hidden (..., size), divides by the deviation, scales and shifts.

    See Ba et al., 2016.
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        """Take weight and bias (size,), or any that broadcast to hidden; None leaves one out."""
        self.weight, self.bias = weight, bias
        self.eps = eps

    def __call__(self, hidden: Tensor) -> Tensor:
        """Same shape and dtype as hidden."""
        size = hidden.shape[-1:]
        if self.weight is None or self.weight.shape == size:
            fits = self.weight is None or self.weight.dtype == hidden.dtype
            if fits and (self.bias is None or self.bias.dtype == hidden.dtype):
                return F.layer_norm(hidden, size, self.weight, self.bias, self.eps)
        normed = F.layer_norm(hidden.float(), size, None, None, self.eps)
        if self.weight is not None:
            normed = normed.mul_(self.weight)
        return (normed if self.bias is None else normed.add_(self.bias)).to(hidden.dtype)


class HeadNorm:
    """RMSNorm over each head of queries and keys in one call (QK-norm); each of the two has its own weight."""

    def __init__(self, query_weight: Tensor, key_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float) -> None:
        """Repeat the two weights (head_dim,) head by head: (num_heads + num_kv_heads, head_dim), queries first."""
        self.weight = torch.cat((query_weight.expand(num_heads, -1), key_weight.expand(num_kv_heads, -1)))
        self.eps = eps

    def __call__(self, hidden: Tensor) -> Tensor:
        """Same shape and dtype as hidden (num_tokens, num_heads + num_kv_heads, head_dim)."""
        return normalise(hidden, self.eps).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class NormedHeads:
    """A `HeadLayer` with norms around another one, which rotates.

    Attributes:
        heads: From `LayerKernels.heads`, without norm.
        queries, keys: Norms over (num_tokens, their heads, head_dim).
        is_last: Whether the norms come behind the rotation.
    """

    heads: HeadLayer
    queries: Layer
    keys: Layer
    num_heads: int
    num_kv_heads: int
    is_last: bool

    def __call__(self, qkv: Tensor, rotation: Tensor, cache: PagedCache | None) -> tuple[Tensor, Tensor, Tensor]:
        """See `HeadLayer`."""
        queries, keys, _ = qkv.split_with_sizes((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.is_last:
            queries.copy_(rotate(queries, rotation))
            keys.copy_(rotate(keys, rotation))
            rotation = torch.zeros_like(rotation)
            rotation[:, 0] = 1  # a turn by nothing
        queries.copy_(self.queries(queries))
        keys.copy_(self.keys(keys))
        return self.heads(qkv, rotation, cache)


def over_all_heads(norm: Layer) -> Layer:
    """A norm over all heads of a token as one vector."""
    return lambda heads: norm(heads.flatten(1)).view_as(heads)


def unchanged_heads(num_heads: int, num_kv_heads: int) -> HeadLayer:
    """A `HeadLayer` without norm and rotation, which leaves writing K/V to the attention backend."""

    def split(qkv: Tensor, rotation: Tensor, cache: PagedCache | None) -> tuple[Tensor, Tensor, Tensor]:
        assert cache is None, "attention among whole texts writes what it keeps"
        queries, keys, values = qkv.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return queries, keys, values

    return split


@dataclass(frozen=True, slots=True)
class ParallelBlock(Block):
    """A block whose halves stand side by side: both read the same hidden states (Wang and Komatsuzaki, 2021).

    Attributes:
        feed_forward_norm: None if the feed-forward layer shares the norm of the mixer.
    """

    mixer_norm: Layer
    mixer: Mixer
    feed_forward_norm: Layer | None
    feed_forward: FeedForward

    @override
    def forward(self, hidden: Tensor, step: BlockStep) -> Tensor:
        normed = self.mixer_norm(hidden)
        mixed = self.mixer.mix(normed, step)
        if step.rows is not None:
            hidden, normed, mixed = hidden[step.rows], normed[step.rows], mixed[step.rows]
            if not len(step.rows):  # an empty launch is an error on CUDA
                return hidden
        inputs = self.feed_forward_norm(hidden) if self.feed_forward_norm else normed
        self.mixer.add_to(hidden, mixed)
        self.feed_forward.add_to(hidden, inputs)
        return hidden


@dataclass(frozen=True, slots=True)
class PostNormBlock(Block):
    """A block with a norm behind the sum of each half and its input (Vaswani et al., 2017), as in BERT.

    Without a feed-forward layer it is the first half alone.
    """

    mixer: Mixer
    mixer_norm: Layer
    feed_forward: FeedForward | None
    feed_forward_norm: Layer

    @override
    def forward(self, hidden: Tensor, step: BlockStep) -> Tensor:
        mixed = self.mixer.mix(hidden, step)
        if step.rows is not None:
            hidden, mixed = hidden[step.rows], mixed[step.rows]
            if not len(step.rows):  # an empty launch is an error on CUDA
                return hidden
        self.mixer.add_to(hidden, mixed)
        hidden = self.mixer_norm(hidden)
        if self.feed_forward is None:
            return hidden
        self.feed_forward.add_to(hidden, hidden)
        return self.feed_forward_norm(hidden)
