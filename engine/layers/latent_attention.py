"""Multi-head latent attention: a token keeps one latent, of which all heads make their keys and values.

A head's score of a token is q . (K c) = (K^T q) . c, and its result is V (sum of weights x c). So a step multiplies its
queries by K^T and its results by V, and attention itself sees one key per token, the latent, which is its own
value. The cache is read once for all heads, and no token is expanded to keys and values of every head (absorbed
products: DeepSeek-AI, DeepSeek-V2, 2024, section 2.1 and appendix C). Positions are in a few values behind the latent.
"""

from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine.layers.block import BlockStep, Mixer
from weft.engine.layers.parts import Layer, Linear
from weft.engine.layers.rotary import rotate


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of latent attention.

    Attributes:
        num_heads: Query heads.
        plain: Values of a head's query and key that know no positions.
        rotary: Values that do; keys have them once for all heads.
        latent: Values of a latent.
        value: Values of a head's result.
        query_latent: Values of the latent of queries; None if hidden states are projected to queries at once.
    """

    num_heads: int
    plain: int
    rotary: int
    latent: int
    value: int
    query_latent: int | None = None

    @property
    def queries(self) -> int:
        """Values of the queries of a token."""
        return self.num_heads * (self.plain + self.rotary)

    @property
    def key(self) -> int:
        """Values that a token keeps."""
        return self.latent + self.rotary


@dataclass(frozen=True, slots=True)
class LatentAttention(Mixer):
    """Latent attention over the paged cache.

    Attributes:
        inputs: Queries, or the latent that they are made of, then the latent and the rotary part of the key, stacked.
        queries: Makes queries of their latent, after its norm; None if inputs has queries.
        latent_norm: Norm of latents.
        absorb: K^T of each head, (num_tokens, num_heads, plain) -> (num_tokens, num_heads, latent).
        expand: V of each head, (num_tokens, num_heads, latent) -> (num_tokens, num_heads, value).
        cache: Index of its cache in the model.
        rotation: Index of its rotary embedding among those of the model; None for none.
    """

    inputs: Linear
    queries: Layer | None
    latent_norm: Layer
    absorb: Layer
    expand: Layer
    o: Linear
    sizes: LatentSizes
    cache: int
    rotation: int | None = 0

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        num_tokens, sizes = normed.size(0), self.sizes
        queries, latents, key = self.inputs(normed).split_with_sizes(
            (sizes.query_latent or sizes.queries, sizes.latent, sizes.rotary), dim=1
        )
        if self.queries is not None:
            queries = self.queries(queries.contiguous())
        plain, heads = queries.view(num_tokens, sizes.num_heads, -1).split_with_sizes((sizes.plain, sizes.rotary), 2)
        heads = torch.cat((heads, key.unsqueeze(1)), 1)
        if self.rotation is not None:
            heads = rotate(heads, step.rotations[self.rotation])
        heads, keys = heads.split_with_sizes((sizes.num_heads, 1), 1)
        normed_latents = self.latent_norm(latents.contiguous()).unsqueeze(1)
        absorbed, keys = torch.cat((self.absorb(plain), heads), 2), torch.cat((normed_latents, keys), 2)
        attended = step.caches.attention.attend(self.cache, absorbed, keys, keys[..., : sizes.latent])
        return self.expand(attended).flatten(1)

    @override
    def add_to(self, residual: torch.Tensor, mixed: torch.Tensor) -> None:
        self.o.add_to(residual, mixed)
