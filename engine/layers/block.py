"""A model is a run of blocks; a block mixes tokens, then computes each by itself, and adds both to the hidden states.

What mixes (attention) and what computes (a gated feed-forward layer) are parts behind protocols, so that another kind
of model is another part or another block. Nothing here knows a family or a checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from weft.engine.kernels.torch.states import StateStep
from weft.engine.layers.attention import AttentionStep
from weft.engine.layers.parts import HeadLayer, Layer, Linear


@dataclass(frozen=True, slots=True)
class BlockStep:
    """What blocks are given besides hidden states.

    Attributes:
        rotation: Of each token, from `RotaryTable.gather`.
        attention: Writes and reads the KV cache of this step.
        rows: (num_rows,) indices of the tokens whose hidden states are wanted behind the block; None for all. Of the
            others a block computes what its cache needs: three quarters of its matrices are for nothing there.
        states: Reads and writes the states of this step; None in a model that keeps none.
    """

    rotation: torch.Tensor
    attention: AttentionStep
    rows: torch.Tensor | None = None
    states: StateStep | None = None


class Block(Protocol):
    """One layer of a model, or a run of them in one call."""

    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        """Hidden states (num_tokens, hidden_size), which may be changed -> those behind the block, of `step.rows`."""


class Mixer(Protocol):
    """The half of a block in which tokens see others."""

    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        """(num_tokens, hidden_size) -> (num_tokens, inner size), for `add_to`; updates what it caches."""

    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        """Add the outputs for some rows of `mix` to their hidden states, in place."""


class FeedForward(Protocol):
    """The half of a block that computes each token by itself."""

    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        """Add the outputs for normed (num_tokens, hidden_size) to the hidden states, in place."""


def run_blocks(blocks: Sequence[Block], hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
    """One block after the other; `step.rows` is what is wanted behind the last one."""
    whole = replace(step, rows=None)
    for block in blocks[:-1]:
        hidden = block.forward(hidden, whole)
    return blocks[-1].forward(hidden, step) if blocks else hidden


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention over the paged cache.

    Attributes:
        qkv: Queries, keys and values stacked, ((num_heads + 2 * num_kv_heads) * head_dim, hidden_size).
        heads: QK-norm, in families that have it, and rotary embedding.
        cache: Index of its cache in the model.
    """

    qkv: Linear
    heads: HeadLayer
    o: Linear
    head_dim: int
    cache: int

    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        """See `Mixer`."""
        num_tokens = normed.size(0)
        qkv = self.qkv(normed).view(num_tokens, -1, self.head_dim)
        heads = self.heads(qkv, step.rotation, step.attention.cache(self.cache))
        return step.attention.attend(self.cache, *heads).reshape(num_tokens, -1)

    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        """See `Mixer`."""
        self.o.add_to(residual, mixed)


@dataclass(frozen=True, slots=True)
class GatedFeedForward:
    """`gated` is the layer up to its inner size."""

    gated: Layer
    down: Linear

    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        """See `FeedForward`."""
        self.down.add_to(residual, self.gated(normed))


@dataclass(frozen=True, slots=True)
class PreNormBlock:
    """Each half computes what its norm makes of the hidden states (Xiong et al., 2020)."""

    mixer_norm: Layer
    mixer: Mixer
    feed_forward_norm: Layer
    feed_forward: FeedForward

    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        """See `Block`."""
        mixed = self.mixer.mix(self.mixer_norm(hidden), step)
        if step.rows is not None:
            hidden, mixed = hidden[step.rows], mixed[step.rows]
            if not len(step.rows):  # an empty launch is an error on CUDA
                return hidden
        self.mixer.add_to(hidden, mixed)
        self.feed_forward.add_to(hidden, self.feed_forward_norm(hidden))
        return hidden
