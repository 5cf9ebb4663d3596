"""The decoder and the blocks it runs, and the protocols of what blocks call: matrices, paged attention and states.

A block is a mixer across tokens (attention), then a feed-forward layer, both added to the hidden states. Mixer and
feed-forward layer are parts behind protocols. Another kind of model is another part or another block. Nothing here
knows a family or a checkpoint.

All tensors are flat over the tokens of a step; inputs of layers are (num_tokens, features) in the model's dtype. A
model owns no cache: the caller passes the `StepCaches` of each step, and runs everything under `torch.inference_mode`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from torch import Tensor
from typing_extensions import override

from weft.engine.batch import Batch, Ints
from weft.engine.cache.specs import CacheSpec
from weft.engine.layers.rotary import PositionTable

Layer = Callable[[Tensor], Tensor]


class Linear(Protocol):
    """A matrix of the model, or several that share their input, stacked along the outputs."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""

    def add_to(self, residual: Tensor, inputs: Tensor) -> None:
        """Add the outputs to residual (num_tokens, out_features), in place."""

    def to_float32(self, inputs: Tensor) -> Tensor:
        """The outputs in float32. The caller may overwrite them, and so may the next call."""


class PagedCache(NamedTuple):
    """Where a layer writes the K/V that it prepares.

    Attributes:
        blocks: (num_blocks, 2, num_kv_heads, block_size, head_dim), with 2 for keys and values, or 1 for latents.
        slots: (num_tokens,) int32, block * block_size + offset in the block; -1 writes nothing.
        scales: (2, num_kv_heads) float32, by which K and V are divided before they are rounded to fp8; else not read.
    """

    blocks: Tensor
    slots: Tensor
    scales: Tensor


# Queries, keys and values of the tokens of a step.
Heads = tuple[Tensor, Tensor, Tensor]

# Takes (num_tokens, num_heads + 2 * num_kv_heads, head_dim), the rotation of each token from `RotaryTable.gather`, and
# `AttentionStep.cache`. Returns queries, keys and values. May change its first argument. Writes K/V to the cache unless
# that is None.
HeadLayer = Callable[[Tensor, Tensor, PagedCache | None], Heads]


class AttentionStep(Protocol):
    """Attention for the batch of one step. `AttentionBackend.begin` makes it; each layer uses it once."""

    def cache(self, layer: int) -> PagedCache | None:
        """Where the model writes K/V of a layer before it calls `attend`; None if `attend` writes them."""

    def attend(self, layer: int, heads: Heads, sinks: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Attend causally, each token within its request; first write keys and values unless `cache` returns a place.

        Args:
            layer: Index of the layer.
            heads: Queries (num_tokens, num_heads, head_dim), rotary embedding applied; keys (num_tokens, num_kv_heads,
                head_dim), rotary embedding applied; values (num_tokens, num_kv_heads, value_dim), of latents the first
                values of the keys.
            sinks: (num_heads,) float32, of a layer whose spec says `has_sinks`; None for any other.
            bias: (num_heads, 2 * n) float32, of a layer whose spec says `has_bias`; None for any other. Column n +
                position of the key - position of the query is added to the scaled score.

        Returns:
            (num_tokens, num_heads, value_dim), valid until the next call, which may reuse the memory.
        """


class AttentionBackend(Protocol):
    """Owns the KV cache tensors of all layers. Constructed with groups, number of blocks, block size, dtype, device.

    It alone knows the layout of its cache, and writes and copies it. The model hands it queries, keys and values of one
    layer and gets the attention output. Block tables and slots reach it through `begin`, once per step.
    `weft.engine.cache.specs` says what a layer keeps and how layers form groups.

    Attributes:
        supports_graphs: Whether steps may be captured and replayed, see `weft.engine.runner.cuda_graphs`. Four things
            hold then. `begin` writes the batch to device memory that never moves, and does not wait for the device. If
            `Batch.graph` names a recorded step, `attend` takes its padding, too, and what it launches depends only on
            that name. Padding reads no keys, writes none, and gets zeros, so that no value of it is infinite or not a
            number. A batch without requests is all padding.
    """

    name: str
    supports_graphs: bool

    def prepare(self) -> bool:
        """Spend a few milliseconds of idle time on work that steps would wait for; returns whether more is left."""

    def blocks(self, layer: int) -> Sequence[Tensor]:
        """The tensors that hold the blocks of a layer, each (num_blocks, ...) and contiguous."""

    def begin(self, batch: Batch) -> AttentionStep:
        """Do the block copies of the batch, and prepare the metadata that all layers share."""


class StateStep(Protocol):
    """Reads and writes the states of fixed size of one step, by copies or in place.

    `read` and `write` copy. A kernel that changes states in place takes `tensor`, `slots` and `is_new` instead.

    Attributes:
        query_start_locs: (num_requests + 1,) on the host, where each request's tokens start.
        is_new: (num_requests,) bool on the device, whether the request has no state yet. What its slot holds is then
            left over from another request and counts as zeros.
    """

    query_start_locs: Ints
    is_new: Tensor

    def read(self, layer: int) -> Tensor:
        """(num_requests, *shape): the states before this step's tokens, zeros for a new request."""

    def write(self, layer: int, states: Tensor) -> None:
        """Keep the states (num_requests, *shape) after this step's tokens."""

    def tensor(self, layer: int) -> Tensor:
        """(num_slots, *shape): the states of all requests, contiguous. Only the slots of this step may be changed."""

    def slots(self, layer: int) -> Tensor:
        """(num_requests,) int64 on the device: the slot of each request, distinct except for slot 0 of padding."""


@dataclass(frozen=True, slots=True)
class StepCaches:
    """The caches of one step, by kind, and what its blocks leave for later ones.

    Attributes:
        states: None if no layer keeps a state.
        passed: By name, what a block made of the step's tokens and a later one reads.
        tapped: By number of layers, the hidden states of all tokens behind them, as far as a follower reads such.
    """

    attention: AttentionStep
    states: StateStep | None = None
    passed: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    tapped: dict[int, Tensor] = field(default_factory=dict)

    @property
    def kept(self) -> StateStep:
        """The states, for a layer that keeps some."""
        assert self.states is not None
        return self.states


@dataclass(frozen=True, slots=True)
class BlockStep:
    """What blocks get besides hidden states.

    Attributes:
        rotations: Rotation of each token, from `RotaryTable.gather`, one for each rotary embedding of the model.
        caches: The caches of this step.
        rows: (num_rows,) indices of the tokens whose outputs are wanted; None for all. For the other tokens a block
            computes only what its caches need, which saves three quarters of the matrix work.
    """

    rotations: tuple[Tensor, ...]
    caches: StepCaches
    rows: Tensor | None = None


class Block(Protocol):
    """One layer of a model, or several in one call."""

    def forward(self, hidden: Tensor, step: BlockStep) -> Tensor:
        """Hidden states (num_tokens, hidden_size) -> those after the block, of `step.rows`. May change its input."""


class Mixer(Protocol):
    """The half of a block in which tokens see others."""

    def mix(self, normed: Tensor, step: BlockStep) -> Tensor:
        """(num_tokens, hidden_size) -> (num_tokens, inner size), the input of `add_to`; updates its caches."""

    def add_to(self, residual: Tensor, mixed: Tensor) -> None:
        """Project some rows of what `mix` returned and add them to their hidden states, in place."""


class ProjectedMixer(Mixer, Protocol):
    """A mixer whose `add_to` is a matrix."""

    output: Linear

    @override
    def add_to(self, residual: Tensor, mixed: Tensor) -> None:
        self.output.add_to(residual, mixed)


class FeedForward(Protocol):
    """The half of a block that computes each token by itself."""

    def add_to(self, residual: Tensor, normed: Tensor) -> None:
        """Add the outputs for normed (num_tokens, hidden_size) to the hidden states, in place."""


def run_blocks(blocks: Sequence[Block], hidden: Tensor, step: BlockStep) -> Tensor:
    """Run blocks in order; `step.rows` applies to the last one only."""
    all_rows = replace(step, rows=None)
    for block in blocks[:-1]:
        hidden = block.forward(hidden, all_rows)
    return blocks[-1].forward(hidden, step) if blocks else hidden


@dataclass(frozen=True, slots=True)
class Attention(ProjectedMixer):
    """Softmax attention over the paged cache.

    Attributes:
        qkv: Queries, keys and values stacked, ((num_heads + 2 * num_kv_heads) * head_dim, hidden_size).
        heads: QK-norm, if the family has it, and rotary embedding.
        cache: Index of its cache in the model.
        rotation: Index of its rotary embedding among those of the model.
        sinks, bias: See `AttentionStep.attend`; None for none.
    """

    qkv: Linear
    heads: HeadLayer
    output: Linear
    head_dim: int
    cache: int
    rotation: int = 0
    sinks: Tensor | None = None
    bias: Tensor | None = None

    @override
    def mix(self, normed: Tensor, step: BlockStep) -> Tensor:
        return self.attend(self.qkv(normed), step)

    def attend(self, qkv: Tensor, step: BlockStep) -> Tensor:
        """`mix` of what the projections made; may change it."""
        num_tokens, attention = qkv.size(0), step.caches.attention
        qkv = qkv.view(num_tokens, -1, self.head_dim)
        heads = self.heads(qkv, step.rotations[self.rotation], attention.cache(self.cache))
        return attention.attend(self.cache, heads, self.sinks, self.bias).reshape(num_tokens, -1)


@dataclass(frozen=True, slots=True)
class GatedFeedForward(FeedForward):
    """Feed-forward layer of two steps; `gated` computes activation(gate(x)) * up(x), or activation(up(x))."""

    gated: Layer
    down: Linear

    @override
    def add_to(self, residual: Tensor, normed: Tensor) -> None:
        self.down.add_to(residual, self.gated(normed))


def unchanged(hidden: Tensor) -> Tensor:
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
    def forward(self, hidden: Tensor, step: BlockStep) -> Tensor:
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


class Model(Protocol):
    """What the runner needs of a model. No method waits for the device."""

    def forward(self, token_ids: Tensor, positions: Tensor, caches: StepCaches, rows: Tensor | None = None) -> Tensor:
        """Run the tokens of one step through all blocks.

        Args:
            token_ids: (num_tokens,) int64.
            positions: (num_tokens,) int64, position of each token in its request.
            caches: The caches of this step.
            rows: (num_rows,) indices of the tokens whose hidden states are wanted; None for all.

        Returns:
            (num_rows, hidden_size) hidden states after the final norm, in the model's dtype.
        """

    def typed(self, positions: Tensor, token_types: Tensor) -> Tensor:
        """Positions for `forward` that say the types of tokens, too; a model that knows no types ignores them."""
        return positions

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """(num_rows, vocab_size) float32 logits of (num_rows, hidden_size). The next call may overwrite them."""


class LoadedModel(Model, Protocol):
    """A model with its weights, whoever wrote it."""

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each cache keeps."""

    @property
    def weights_bytes(self) -> int:
        """Memory that the weights take."""


@dataclass(frozen=True, slots=True)
class Decoder(Model):
    """A model ready to run on one device: embedding, blocks, final norm, output head.

    Made by `weft.engine.models.loading`.

    Attributes:
        head: None in a later pipeline stage.
        blocks: `LayerKernels.fuse` may have made one block of several layers.
        norm: Behind the last block.
        rotaries: Every rotary embedding of the model, and what else depends on positions; blocks name them by index.
        cache_specs: What each cache keeps.
        weights_bytes: Memory that the weights take.
        positions: A learned embedding of positions; None for none.
        embedding_norm: Of the sum of embeddings.
        num_types: Types that tokens may have. The embedding of positions has num_positions rows for each of them.
    """

    embedding: Layer
    blocks: Sequence[Block]
    norm: Layer
    head: Linear | None
    rotaries: tuple[PositionTable, ...]
    cache_specs: tuple[CacheSpec, ...]
    weights_bytes: int
    positions: Layer | None = None
    embedding_norm: Layer = unchanged
    num_types: int = 1
    num_positions: int = 0

    @override
    def forward(self, token_ids: Tensor, positions: Tensor, caches: StepCaches, rows: Tensor | None = None) -> Tensor:
        return self.forward_embedded(self.embedding(token_ids), positions, caches, rows)

    def forward_embedded(
        self, hidden: Tensor, positions: Tensor, caches: StepCaches, rows: Tensor | None = None
    ) -> Tensor:
        """`forward` of embeddings, (num_tokens, hidden_size)."""
        step = BlockStep(tuple(rotary.gather(positions) for rotary in self.rotaries), caches, rows)
        if self.positions is not None:
            hidden = hidden + self.positions(positions)
        hidden = run_blocks(self.blocks, self.embedding_norm(hidden), step)
        return self.norm(hidden) if hidden.size(0) else hidden  # an empty launch is an error on CUDA

    @override
    def typed(self, positions: Tensor, token_types: Tensor) -> Tensor:
        return positions + token_types.clamp(max=self.num_types - 1) * self.num_positions

    @override
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        assert self.head is not None  # a later stage computes no logits
        return self.head.to_float32(hidden_states)
