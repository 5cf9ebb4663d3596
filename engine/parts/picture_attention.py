"""Layers in which tokens attend to pictures, and not to each other (Llama 3.2 Vision).

Keys and values are made of the features of a picture once, whoever asks about it (see `weft.engine.vision.attended`).
Both halves of such a layer have a gate: a learned number, whose tanh is the factor on what the half adds. A token that
sees no picture, as all of a text without any, passes unchanged. So these layers need no places in the KV cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from weft.engine.describe.config import ModelConfig
from weft.engine.describe.specs import BlockSpec, DecoderSpec, FeedForwardSpec, NormSpec, PartSpec
from weft.engine.describe.tensor_names import dense_spec, extended_spec, norm_spec
from weft.engine.families.llama import PictureLayers
from weft.engine.layers.block import Block, BlockStep, FeedForward, Layer, Linear, StepCaches
from weft.engine.layers.kernels import LayerKernels
from weft.engine.weights.reader import TensorRef, WeightReader, WeightRef


@dataclass(frozen=True, slots=True)
class PictureRun:
    """Tokens of a step that see the same pictures.

    Attributes:
        tokens: (n,) their indices, at least one.
        seen: Of each picture, (num_layers, 2, num_kv_heads, num_features, head_dim), with 2 for keys and values.
    """

    tokens: Tensor
    seen: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class PictureCaches(StepCaches):
    """The caches of a step in which tokens see pictures; no token is in two of the runs."""

    runs: tuple[PictureRun, ...] = ()


@dataclass(frozen=True, slots=True)
class PictureBlock(Block):
    """One layer.

    Attributes:
        index: Which of these layers it is, from 0.
        queries: (num_heads * head_dim, hidden_size), of tokens.
        keys_values: Both stacked, (2 * num_kv_heads * head_dim, hidden_size), of features.
        query_norm, key_norm: Over each head.
        gate, feed_forward_gate: (1,).
    """

    index: int
    norm: Layer
    queries: Linear
    keys_values: Linear
    query_norm: Layer
    key_norm: Layer
    output: Linear
    gate: Tensor
    feed_forward_norm: Layer
    feed_forward: FeedForward
    feed_forward_gate: Tensor
    head_dim: int

    def seen(self, features: Tensor) -> Tensor:
        """Keys and values of a picture, whose features are (num_features, hidden_size); see `PictureRun`."""
        keys, values = self.keys_values(features).view(len(features), 2, -1, self.head_dim).unbind(1)
        return torch.stack((self.key_norm(keys), values)).transpose(1, 2).contiguous()

    @override
    def forward(self, hidden: Tensor, step: BlockStep) -> Tensor:
        for run in step.caches.runs if isinstance(step.caches, PictureCaches) else ():
            hidden.index_copy_(0, run.tokens, self._looked(hidden[run.tokens], run.seen))
        return hidden if step.rows is None else hidden[step.rows]

    def _looked(self, hidden: Tensor, seen: Sequence[Tensor]) -> Tensor:
        """Hidden states (n, hidden_size) of tokens that see these pictures, after the layer."""
        parts = [each[self.index] for each in seen]
        keys, values = (parts[0] if len(parts) == 1 else torch.cat(parts, 2))[:, None]
        # All tokens see all keys. So the heads that share keys are one head of more tokens, for which kernels are fast.
        num_tokens, num_kv_heads = len(hidden), keys.shape[1]
        queries = self.query_norm(self.queries(self.norm(hidden)).view(num_tokens, -1, self.head_dim))
        queries = queries.view(num_tokens, num_kv_heads, -1, self.head_dim).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(queries.flatten(1, 2)[None], keys, values)
        attended = attended.view(queries.shape).permute(2, 0, 1, 3).flatten(1)
        hidden = hidden + self.gate.tanh() * self.output(attended)
        added = torch.zeros_like(hidden)
        self.feed_forward.add_to(added, self.feed_forward_norm(hidden))
        return hidden.add_(self.feed_forward_gate.tanh() * added)


@dataclass(frozen=True, slots=True)
class PictureBlockSpec(BlockSpec):
    """`PictureBlock`."""

    index: int
    norm: NormSpec
    queries: WeightRef
    keys_values: WeightRef
    query_norm: NormSpec
    key_norm: NormSpec
    output: WeightRef
    gate: TensorRef
    feed_forward_norm: NormSpec
    feed_forward: FeedForwardSpec
    feed_forward_gate: TensorRef
    head_dim: int

    @property
    @override
    def halves(self) -> dict[str, PartSpec]:
        return {}  # it is on one rank alone, since pictures are

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Block:
        return PictureBlock(
            self.index,
            self.norm.build(kernels, reader),
            kernels.linear(self.queries, reader),
            kernels.linear(self.keys_values, reader),
            self.query_norm.build_by_torch(reader),
            self.key_norm.build_by_torch(reader),
            kernels.linear(self.output, reader),
            reader.tensor(self.gate),
            self.feed_forward_norm.build(kernels, reader),
            self.feed_forward.build(kernels, reader),
            reader.tensor(self.feed_forward_gate),
            self.head_dim,
        )


@extended_spec.register
def picture_decoder_spec(switches: PictureLayers, config: ModelConfig, spec: DecoderSpec) -> DecoderSpec:
    """The decoder with these layers, or, where no pictures are served, without them."""
    blocks, layer, num_found = list[BlockSpec](), 0, 0
    for block in spec.blocks:
        if block.weights and layer in switches.indices:  # a tap has none
            if config.vision is not None:
                blocks.append(_picture_block_spec(config, f"{config.switches.names.layers}.{layer}", num_found))
            num_found += 1
        else:
            blocks.append(block)
        layer += bool(block.weights)
    return replace(spec, blocks=tuple(blocks))


def _picture_block_spec(config: ModelConfig, layer: str, index: int) -> PictureBlockSpec:
    names, hidden, dim = config.switches.names, config.hidden_size, config.head_dim
    size, kv_size, attention = config.num_heads * dim, config.num_kv_heads * dim, f"{layer}.cross_attn"

    def head_norm(name: str) -> NormSpec:
        return NormSpec(TensorRef(f"{attention}.{name}.weight", (dim,)), config.rms_norm_eps)

    return PictureBlockSpec(
        index,
        norm_spec(config, f"{layer}.{names.mixer_norm}"),
        WeightRef((f"{attention}.q_proj",), (size,), hidden),
        WeightRef((f"{attention}.k_proj", f"{attention}.v_proj"), (kv_size, kv_size), hidden),
        head_norm("q_norm"),
        head_norm("k_norm"),
        WeightRef((f"{attention}.o_proj",), (hidden,), size),
        TensorRef(f"{layer}.cross_attn_attn_gate", (1,)),
        norm_spec(config, f"{layer}.{names.feed_forward_norm}"),
        dense_spec(config, layer, None),
        TensorRef(f"{layer}.cross_attn_mlp_gate", (1,)),
        dim,
    )
