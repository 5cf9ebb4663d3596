"""Describes what a layer keeps of a request between steps, and groups layers of equal specs.

Code that sizes, hands out, copies or frees caches asks the spec. Every group has one block table per request. For keys
and values, a block holds a fixed number of tokens. A state is one block that stands for all tokens of its request. A
new kind of cache, such as the keys of an encoder, is one more class here and a backend, which
`engine/kernels/choice.py` makes and `engine/kernels/torch/caches.py` calls.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Generic, Self, TypeVar

import torch

from weft.engine.batch import Ints

_PositionT = TypeVar("_PositionT", int, Ints)

_FAR = 1 << 30
"""More tokens than any request has."""


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of every token, and how they are attended to.

    With latent_dim there are only keys, whose first latent_dim values are the values, too: the latents of multi-head
    latent attention, one for all heads (DeepSeek-AI, 2024, section 2.1).

    Attributes:
        can_rewind: Whether a request can go back to an earlier token.
        num_kv_heads: Heads of K and of V.
        head_dim: Values per head.
        sliding_window: A token sees itself and the sliding_window - 1 tokens before it; None means all before it.
            Behind an encoder's input these are the decoder's own; the input is seen whole.
        scale: Factor on the scores; None means head_dim ** -0.5.
        soft_cap: Scaled scores become soft_cap * tanh(score / soft_cap) before the mask; None for no cap.
        latent_dim: Values of a latent, a part of head_dim; None if values are kept apart from keys.
        span: A token sees the tokens of its own span of this many positions only, up to itself; None means no spans.
            At most one of sliding_window and span is given.
        slopes: ALiBi (Press et al., 2022): one slope per query head. slope * (key position - query position) is added
            to the scaled scores. Empty for none.
        has_sinks: Whether one learned logit per query head joins the denominator of the softmax; `attend` gets them.
        num_heads: Query heads; None means those that the model names for all layers.
        is_bidirectional: Whether a token sees the tokens behind it, too, as far as those before it. A request is then
            computed whole, in one step, and no later step reads its keys and values. So all layers share a cache.
        has_bias: Whether a learned number for each head and distance is added to the scaled scores; `attend` gets them.
        num_mutual: Most tokens of a picture, where these see each other, also those behind them
            (`torch/mutual_step.py`), but nothing before their windows. So no step cuts them in two. 0: they see as
            others do.
        sees_end: Whether a token sees all tokens behind it in the step of `part`.
        num_input_tokens: Most tokens of an encoder's input; 0 without an encoder. A request begins with its input,
            padded to whole blocks. What the layer keeps of these tokens are the encoder's keys and values, written
            once, in one step. The decoder's own tokens follow; among themselves they see no token of the input.
        num_input_samples: Of sound, where that is what the longest input is; 0 for tokens.
    """

    can_rewind: ClassVar[bool] = True
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    latent_dim: int | None = None
    span: int | None = None
    slopes: tuple[float, ...] = ()
    has_sinks: bool = False
    num_heads: int | None = None
    is_bidirectional: bool = False
    has_bias: bool = False
    num_mutual: int = 0
    sees_end: bool = False
    num_input_tokens: int = 0
    num_input_samples: int = 0

    @property
    def num_ahead(self) -> int:
        """Tokens behind it that a token sees, if there are so many."""
        if not self.is_bidirectional:
            return _FAR if self.sees_end else 0
        return _FAR if self.sliding_window is None else self.sliding_window - 1

    @property
    def value_dim(self) -> int:
        """Values per head of V and of the results."""
        return self.head_dim if self.latent_dim is None else self.latent_dim

    @property
    def num_sides(self) -> int:
        """What a token keeps per head: 2 for K and V, 1 for a latent."""
        return 2 if self.latent_dim is None else 1

    @property
    def sees_all(self) -> bool:
        """Whether a token sees all tokens before it, or the input before them: then no block is given back early."""
        return (self.sliding_window is None or self.num_input_tokens > 0) and self.span is None

    def part(self, has_inputs: bool, is_mutual: bool) -> Self:
        """As a step sees it that has only what is behind the inputs, or, without inputs, only those.

        Args:
            is_mutual: See `Batch`.
        """
        if is_mutual:
            return replace(self, sees_end=True)
        window = self.sliding_window if has_inputs else None
        return replace(self, sliding_window=window, num_input_tokens=0) if self.num_input_tokens else self

    @property
    def is_plain(self) -> bool:
        """Whether libraries know such attention: a softmax of scores of keys over a window."""
        is_causal = self.span is None and not self.is_bidirectional
        return self.latent_dim is None and is_causal and not (self.slopes or self.has_sinks or self.has_bias)

    def first_seen(self, position: _PositionT) -> _PositionT:
        """The first position that the token at a position sees; for one or an array of them. An input is all seen."""
        if self.span is not None:
            return position - position % self.span
        if self.sliding_window is None or self.num_input_tokens:
            return position * 0
        return _positive(position - self.sliding_window + 1)

    @property
    def score_scale(self) -> float:
        """Factor on the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def tokens_per_block(self, block_size: int) -> int:
        """Tokens of a request that a block stands for."""
        return block_size

    def pool_size(self, num_blocks: int, num_states: int) -> int:
        """Blocks of the pool, the null block included. num_states is the number of states."""
        return num_blocks

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that a block of tokens takes in one layer. In int8, K and V of a head have a scale for each token."""
        head_bytes = self.head_dim * dtype.itemsize + (dtype == torch.int8) * torch.float32.itemsize
        return self.num_sides * block_size * self.num_kv_heads * head_bytes

    @property
    def bytes_per_request(self) -> int:
        """Bytes that a request takes in one layer, however long it is."""
        return 0


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of fixed size that every token of a request changes, as in recurrent layers.

    Only the state after the last computed token exists, besides copies of earlier ones: a prefix can be shared where
    there is one (`state_stops.py`), and refused drafts are taken back by going to the state before them. A fork copies
    the state at the token where it is.

    Attributes:
        can_rewind: See `PagedKV`.
        sliding_window: See `PagedKV`; a state is never given back early.
        is_bidirectional, num_mutual, num_input_tokens, num_input_samples: See `PagedKV`.
        sees_all: See `PagedKV`; of states a token sees only the one after the token before it.
        shape: Shape of one request's state.
        dtype: Dtype of its values, whatever the model's is.
    """

    can_rewind: ClassVar[bool] = False
    is_bidirectional: ClassVar[bool] = False
    num_mutual: ClassVar[int] = 0
    num_input_tokens: ClassVar[int] = 0
    num_input_samples: ClassVar[int] = 0
    sliding_window: ClassVar[None] = None
    sees_all: ClassVar[bool] = False
    shape: tuple[int, ...]
    dtype: torch.dtype

    def first_seen(self, position: int) -> int:
        """See `PagedKV`: the place of the state that the token goes on from."""
        return max(0, position - 1)

    def tokens_per_block(self, block_size: int) -> int:
        """See `PagedKV`: one block stands for all tokens."""
        return sys.maxsize

    def pool_size(self, num_blocks: int, num_states: int) -> int:
        """See `PagedKV`."""
        return num_states + 1

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """See `PagedKV`."""
        return 0

    @property
    def bytes_per_request(self) -> int:
        """See `PagedKV`."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ModuleCache:
    """A cache that a module of transformers keeps itself, one object for each request.

    Blocks of tokens only count what the objects hold. An object belongs to one request, so nothing of it is shared,
    and a fork begins at its first token.

    Attributes:
        can_rewind, is_bidirectional, num_mutual, num_input_tokens, num_input_samples, sliding_window, sees_all: See
            `StateSpec` and `PagedKV`.
        bytes_per_token: What an object takes for each token, over all layers.
        bytes_per_request: What it takes beside that.
    """

    can_rewind: ClassVar[bool] = False
    is_bidirectional: ClassVar[bool] = False
    num_mutual: ClassVar[int] = 0
    num_input_tokens: ClassVar[int] = 0
    num_input_samples: ClassVar[int] = 0
    sliding_window: ClassVar[None] = None
    sees_all: ClassVar[bool] = True
    bytes_per_token: int
    bytes_per_request: int

    def first_seen(self, position: int) -> int:
        """See `PagedKV`."""
        return 0

    def tokens_per_block(self, block_size: int) -> int:
        """See `PagedKV`."""
        return block_size

    def pool_size(self, num_blocks: int, num_states: int) -> int:
        """See `PagedKV`."""
        return num_blocks

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """See `PagedKV`; the objects decide their dtype."""
        return block_size * self.bytes_per_token


def _positive(number: _PositionT) -> _PositionT:
    return number * (number > 0)


CacheSpec = PagedKV | StateSpec | ModuleCache
"""What one layer keeps, and of what size. Layers of equal specs form a group and share block tables."""

SpecT = TypeVar("SpecT", bound=CacheSpec)
SpecT_co = TypeVar("SpecT_co", bound=CacheSpec, covariant=True)


@dataclass(frozen=True, slots=True)
class CacheGroup(Generic[SpecT_co]):
    """The layers (ascending indices of their caches) that share one spec."""

    spec: SpecT_co
    layers: tuple[int, ...]

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block of tokens takes over all layers of the group."""
        return self.spec.bytes_per_block(block_size, dtype) * len(self.layers)

    @property
    def request_bytes(self) -> int:
        """Bytes that one request takes over all layers of the group, however long it is."""
        return self.spec.bytes_per_request * len(self.layers)


def group_layers(specs: Sequence[SpecT], kinds: Sequence[SpecT] = ()) -> tuple[CacheGroup[SpecT], ...]:
    """Group layers by equal spec, in order of first appearance; kinds come first, even those of no layer."""
    layers: dict[SpecT, list[int]] = {spec: [] for spec in kinds}
    for layer, spec in enumerate(specs):
        layers.setdefault(spec, []).append(layer)
    return tuple(CacheGroup(spec, tuple(indices)) for spec, indices in layers.items())


PagedGroups = tuple[CacheGroup[PagedKV], ...]


def paged_groups(groups: Sequence[CacheGroup[CacheSpec]]) -> PagedGroups:
    """The groups that keep keys and values."""
    return tuple(CacheGroup(g.spec, g.layers) for g in groups if isinstance(g.spec, PagedKV))
