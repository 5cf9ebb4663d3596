"""Multi-head latent attention: a token keeps one latent, of which all heads make their keys and values.

A head's score of a token is q . (K c) = (K^T q) . c, and its result is V (sum of weights x c). So a step multiplies its
queries by K^T and its results by V, and attention itself sees one key per token, the latent, which is its own
value. The cache is read once for all heads, and no token is expanded to keys and values of every head (absorbed
products: DeepSeek-AI, DeepSeek-V2, 2024, section 2.1 and appendix C). Positions are in a few values behind the latent.

`LatentAttentionSpec` describes it before it is loaded. The tensors have the names of DeepSeek's checkpoints.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from typing_extensions import override

from weft.engine.cache.specs import PagedKV
from weft.engine.describe.config import ModelConfig
from weft.engine.describe.cut import Cut
from weft.engine.describe.specs import MixerSpec, NormSpec, OutputSpec
from weft.engine.describe.tensor_names import mixer_spec, output_spec
from weft.engine.families.latent import LatentSwitches
from weft.engine.layers.block import BlockStep, Layer, Linear, Mixer, ProjectedMixer
from weft.engine.layers.kernels import LayerKernels
from weft.engine.layers.rotary import rotate
from weft.engine.weights.reader import RowOrder, TensorRef, WeightReader, WeightRef


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
class LatentAttention(ProjectedMixer):
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
    output: Linear
    sizes: LatentSizes
    cache: int
    rotation: int | None = 0

    @override
    def mix(self, normed: torch.Tensor, step: BlockStep) -> torch.Tensor:
        num_tokens, sizes = normed.size(0), self.sizes
        widths = (sizes.query_latent or sizes.queries, sizes.latent, sizes.rotary)
        queries, latents, key = self.inputs(normed).split_with_sizes(widths, dim=1)
        if self.queries is not None:
            queries = self.queries(queries.contiguous())
        plain, heads = queries.view(num_tokens, sizes.num_heads, -1).split_with_sizes((sizes.plain, sizes.rotary), 2)
        heads = torch.cat((heads, key.unsqueeze(1)), 1)
        if self.rotation is not None:
            heads = rotate(heads, step.rotations[self.rotation])
        heads, keys = heads.split_with_sizes((sizes.num_heads, 1), 1)
        normed_latents = self.latent_norm(latents.contiguous()).unsqueeze(1)
        absorbed, keys = torch.cat((self.absorb(plain), heads), 2), torch.cat((normed_latents, keys), 2)
        attended = step.caches.attention.attend(self.cache, (absorbed, keys, keys[..., : sizes.latent]))
        return self.expand(attended).flatten(1)


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec(MixerSpec):
    """`LatentAttention`; queries are the norm of the latent of queries and the matrix behind it, None without them.

    keys_values makes plain parts of keys and values of latents, head by head.
    """

    inputs: WeightRef
    queries: tuple[NormSpec, WeightRef] | None
    latent_norm: NormSpec
    keys_values: WeightRef
    output: OutputSpec
    sizes: LatentSizes
    cache: PagedKV
    rotation: int | None

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Mixer:
        inputs, queries, sizes = kernels.linear(self.inputs, reader), None, self.sizes
        if self.queries is not None:
            norm, matrix = self.queries
            queries = _behind(norm.build(kernels, reader), kernels.linear(matrix, reader))
        latent_norm = self.latent_norm.build(kernels, reader)
        weights = reader.dense(self.keys_values)[0].view(sizes.num_heads, sizes.plain + sizes.value, sizes.latent)
        keys, values = weights.split_with_sizes((sizes.plain, sizes.value), 1)
        return LatentAttention(
            inputs=inputs,
            queries=queries,
            latent_norm=latent_norm,
            absorb=kernels.per_head(keys.transpose(1, 2)),
            expand=kernels.per_head(values),
            output=self.output.build(kernels, reader),
            sizes=sizes,
            cache=first_cache,
            rotation=self.rotation,
        )

    @override
    def cut(self, cut: Cut) -> Self:
        sizes = self.sizes
        if not cut.divides(sizes.num_heads):
            return self
        num_heads, by_heads = sizes.num_heads // cut.num_ranks, (sizes.queries, sizes.num_heads)
        first = (sizes.query_latent, 1) if sizes.query_latent else by_heads
        return replace(
            self,
            inputs=cut.by_outputs(self.inputs, first, (sizes.key, 1)),
            queries=self.queries and (self.queries[0], cut.by_outputs(self.queries[1], by_heads)),
            keys_values=cut.by_outputs(self.keys_values, (self.keys_values.out_features, sizes.num_heads)),
            output=self.output.cut(cut),
            sizes=replace(sizes, num_heads=num_heads),
            cache=replace(self.cache, num_heads=num_heads),
        )


def _behind(norm: Layer, matrix: Layer) -> Layer:
    def project(latents: torch.Tensor) -> torch.Tensor:
        return matrix(norm(latents))

    return project


@mixer_spec.register
def latent_attention_spec(
    switches: LatentSwitches, config: ModelConfig, layer: str, output_norm: NormSpec | None
) -> LatentAttentionSpec:
    """Latent attention of the layer of this name."""
    prefix = f"{layer}.{switches.prefix}"
    num_heads, hidden_size, eps = config.num_heads, config.hidden_size, switches.norm_eps
    sizes = LatentSizes(
        num_heads, switches.plain, switches.rotary, switches.latent, switches.value, switches.query_latent
    )
    rotated = torch.arange(sizes.rotary)
    if switches.is_interleaved:
        rotated = torch.cat((rotated[::2], rotated[1::2]))
    head = torch.cat((torch.arange(sizes.plain), sizes.plain + rotated))
    heads = (torch.arange(sizes.num_heads)[:, None] * len(head) + head).flatten()  # where each row of queries is
    num_first = sizes.query_latent or sizes.queries
    firsts = heads if sizes.query_latent is None else torch.arange(num_first)
    rows = torch.cat((firsts, num_first + torch.arange(sizes.latent), num_first + sizes.latent + rotated))
    queries, name = None, "q_proj" if sizes.query_latent is None else "q_a_proj"
    if sizes.query_latent is not None:
        order = _order(heads, switches.is_interleaved)
        matrix = WeightRef((f"{prefix}.q_b_proj",), (sizes.queries,), sizes.query_latent, order=order)
        queries = _norm(f"{prefix}.q_a_layernorm", sizes.query_latent, eps), matrix
    inputs = (f"{prefix}.{name}", f"{prefix}.kv_a_proj_with_mqa")
    per_head = sizes.plain + sizes.value
    output = WeightRef((f"{prefix}.o_proj",), (hidden_size,), num_heads * sizes.value, switches.has_bias)
    return LatentAttentionSpec(
        inputs=WeightRef(
            inputs, (num_first, sizes.key), hidden_size, switches.has_bias, order=_order(rows, switches.is_interleaved)
        ),
        queries=queries,
        latent_norm=_norm(f"{prefix}.kv_a_layernorm", sizes.latent, eps),
        keys_values=WeightRef((f"{prefix}.kv_b_proj",), (sizes.num_heads * per_head,), sizes.latent),
        output=output_spec(config, output, output_norm),
        sizes=sizes,
        cache=PagedKV(1, sizes.key, scale=switches.scale, latent_dim=sizes.latent),
        rotation=0 if switches.has_rope else None,
    )


def _order(rows: torch.Tensor, is_interleaved: bool) -> RowOrder | None:
    return RowOrder(head=tuple(rows.tolist()), num_heads=1) if is_interleaved else None


def _norm(name: str, size: int, eps: float) -> NormSpec:
    return NormSpec(TensorRef(f"{name}.weight", (size,)), eps)
