"""Heads that are not rotated, or normalised in another way than each by itself before the rotation."""

from dataclasses import dataclass

import torch

from weft.engine.layers.attention import PagedCache
from weft.engine.layers.parts import HeadLayer, Layer
from weft.engine.layers.rotary import rotate


@dataclass(frozen=True, slots=True)
class NormedHeads:
    """A `HeadLayer` with norms around another one, which rotates.

    Attributes:
        heads: Of a kit, without norm.
        queries, keys: Norms over (num_tokens, their heads, head_dim).
        is_last: Whether the norms come behind the rotation.
    """

    heads: HeadLayer
    queries: Layer
    keys: Layer
    num_heads: int
    num_kv_heads: int
    is_last: bool

    def __call__(
        self, qkv: torch.Tensor, rotation: torch.Tensor, cache: PagedCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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

    def split(
        qkv: torch.Tensor, rotation: torch.Tensor, cache: PagedCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert cache is None, "attention among whole texts writes what it keeps"
        queries, keys, values = qkv.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return queries, keys, values

    return split
