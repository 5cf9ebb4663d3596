"""Blocks of a model: a mixer across tokens, then a feed-forward layer, both added to the hidden states.

The mixer (attention) and the feed-forward layer are parts behind protocols. Another kind of model is another part or
another block. Nothing here knows a family or a checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from typing_extensions import override

from weft.engine.layers.parts import HeadLayer, Layer, Linear
from weft.engine.layers.step_caches import StepCaches


@dataclass(frozen=True, slots=True)
class BlockStep:
    """What blocks get besides hidden states.

    Attributes:
        rotations: Rotation of each token, from `RotaryTable.gather`, one for each rotary embedding of the model.
        caches: The caches of this step.
        rows: (num_rows,) indices of the tokens whose outputs are wanted; None for all. For the other tokens a block
            computes only what its caches need, which saves three quarters of the matrix work.
    """

    rotations: tuple[torch.Tensor, ...]
    caches: StepCaches
    rows: torch.Tensor | None = None


class Block(Protocol):
    """One layer of a model, or several in one call."""

    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        """Hidden states (num_tokens, hidden_size) -> those after the block, of `step.rows`. May change its input."""


class Mixer(Protocol):
    """The half of a block in which tokens see others."""

    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        """(num_tokens, hidden_size) -> (num_tokens, inner size), the input of `add_to`; updates its caches."""

    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        """Project some rows of what `mix` returned and add them to their hidden states, in place."""


class FeedForward(Protocol):
    """The half of a block that computes each token by itself."""

    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        """Add the outputs for normed (num_tokens, hidden_size) to the hidden states, in place."""


def run_blocks(blocks: Sequence[Block], hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
    """Run blocks in order; `step.rows` applies to the last one only."""
    all_rows = replace(step, rows=None)
    for block in blocks[:-1]:
        hidden = block.forward(hidden, all_rows)
    return blocks[-1].forward(hidden, step) if blocks else hidden


@dataclass(frozen=True, slots=True)
class Attention(Mixer):
    """Softmax attention over the paged cache.

    Attributes:
        qkv: Queries, keys and values stacked, ((num_heads + 2 * num_kv_heads) * head_dim, hidden_size).
        heads: QK-norm, if the family has it, and rotary embedding.
        cache: Index of its cache in the model.
        rotation: Index of its rotary embedding among those of the model.
        sinks: (num_heads,) float32, see `AttentionStep.attend`; None without sinks.
    """

    qkv: Linear
    heads: HeadLayer
    o: Linear
    head_dim: int
    cache: int
    rotation: int = 0
    sinks: torch.Tensor | None = None

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        return self.attend(self.qkv(normed), step)

    def attend(self, qkv: torch.Tensor, step: BlockStep) -> torch.Tensor:
        """`mix` of what the projections made; may change it."""
        num_tokens, attention = qkv.size(0), step.caches.attention
        qkv = qkv.view(num_tokens, -1, self.head_dim)
        heads = self.heads(qkv, step.rotations[self.rotation], attention.cache(self.cache))
        return attention.attend(self.cache, *heads, self.sinks).reshape(num_tokens, -1)

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.o.add_to(residual, mixed)


@dataclass(frozen=True, slots=True)
class GatedFeedForward(FeedForward):
    """Feed-forward layer of two steps; `gated` computes activation(gate(x)) * up(x), or activation(up(x))."""

    gated: Layer
    down: Linear

    @override
    def add_to(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        self.down.add_to(residual, self.gated(normed))


def unchanged(hidden: torch.Tensor) -> torch.Tensor:
    """The layer in place of a norm that a family does not have."""
    return hidden


@dataclass(frozen=True, slots=True)
class PreNormBlock(Block):
    """A block whose halves each start with a norm (Xiong et al., 2020); None for a half that it does not have."""

    mixer_norm: Layer
    mixer: Mixer | None
    feed_forward_norm: Layer
    feed_forward: FeedForward | None

    @override
    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        mixed = self.mixer.mix(self.mixer_norm(hidden), step) if self.mixer else None
        if step.rows is not None:
            hidden, mixed = hidden[step.rows], None if mixed is None else mixed[step.rows]
            if not len(step.rows):  # an empty launch is an error on CUDA
                return hidden
        if self.mixer and mixed is not None:
            self.mixer.add_to(hidden, mixed)
        if self.feed_forward:
            self.feed_forward.add_to(hidden, self.feed_forward_norm(hidden))
        return hidden
