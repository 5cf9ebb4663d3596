"""Describes latent attention before it is loaded; the tensors have the names of DeepSeek's checkpoints."""

from dataclasses import dataclass

import torch
from typing_extensions import override

from weft.engine.cache.specs import PagedKV
from weft.engine.describe.specs import MixerSpec, NormSpec, OutputSpec
from weft.engine.describe.tensor_names import output_spec
from weft.engine.layers.block import Mixer
from weft.engine.layers.kit import LayerKit
from weft.engine.layers.latent_attention import LatentAttention, LatentSizes
from weft.engine.layers.parts import Layer
from weft.engine.models.config import ModelConfig
from weft.engine.models.families.latent import LatentSwitches
from weft.engine.weights.formats import WeightReader
from weft.engine.weights.refs import RowOrder, TensorRef, WeightRef


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
    def build(self, kit: LayerKit, reader: WeightReader, first_cache: int) -> Mixer:
        inputs, queries, sizes = kit.linear(self.inputs, reader), None, self.sizes
        if self.queries is not None:
            norm, matrix = self.queries
            queries = _behind(norm.build(kit, reader), kit.linear(matrix, reader))
        latent_norm = self.latent_norm.build(kit, reader)
        weights = reader.dense(self.keys_values)[0].view(sizes.num_heads, sizes.plain + sizes.value, sizes.latent)
        keys, values = weights.split_with_sizes((sizes.plain, sizes.value), 1)
        return LatentAttention(
            inputs=inputs,
            queries=queries,
            latent_norm=latent_norm,
            absorb=kit.per_head(keys.transpose(1, 2)),
            expand=kit.per_head(values),
            o=self.output.build(kit, reader),
            sizes=sizes,
            cache=first_cache,
            rotation=self.rotation,
        )


def _behind(norm: Layer, matrix: Layer) -> Layer:
    def project(latents: torch.Tensor) -> torch.Tensor:
        return matrix(norm(latents))

    return project


def latent_attention_spec(
    switches: LatentSwitches, config: ModelConfig, prefix: str, output_norm: NormSpec | None
) -> LatentAttentionSpec:
    """Latent attention whose tensors have this prefix."""
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
        matrix = WeightRef(
            (f"{prefix}.q_b_proj",),
            (sizes.queries,),
            sizes.query_latent,
            order=_order(heads, switches.is_interleaved),
        )
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
