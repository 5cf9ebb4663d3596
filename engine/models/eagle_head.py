"""EAGLE-3: a head in a checkpoint of its own, which was trained for a model (Li et al., 2025, section 3).

It is a single layer of Llama. At a position it reads hidden states of the model from behind three of its layers, joined
by a matrix, and the embedding of the next token. Attention gets both beside each other, each with a norm of its own;
the residual stream continues the hidden states. Behind a norm, an output head predicts ids of a small vocabulary, which
`d2t` maps to those of the model. The next draft reads the head's own hidden states, from before that norm, in place of
the joined ones. It may have an embedding of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from typing_extensions import override

from weft.engine.describe.config import ModelConfig, ModelFacts, native_config
from weft.engine.describe.specs import AttentionSpec, BlockSpec, DecoderSpec, FeedForwardSpec, NormSpec, build_norm
from weft.engine.describe.tensor_names import attention_spec, dense_spec, norm_spec
from weft.engine.families.registry import Identity
from weft.engine.families.switches import FAMILIES
from weft.engine.fields import Fields, understood
from weft.engine.layers.block import Block, BlockStep, Decoder, FeedForward, Layer, Linear, Mixer, unchanged
from weft.engine.layers.kernels import LayerKernels
from weft.engine.models.draft_head import BEFORE
from weft.engine.models.loading import LoadFormat, build_decoder, make_rotaries, open_source, stored_names
from weft.engine.weights.quantization import read_quantization
from weft.engine.weights.reader import DenseReader, Progress, TensorRef, WeightReader, WeightRef
from weft.engine.wire.errors import ModelError


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """What config.json and the names of the tensors tell of a head.

    Attributes:
        layer: As a model of Llama's family.
        name: Of the layer, among the tensors.
        depths: Behind how many layers of the model its inputs are.
        target_size: Size of the model's hidden states.
        num_draft_ids: Size of its vocabulary.
        has_ids: Whether it has `d2t`; without, its ids are the model's.
        has_embedding: Whether it has its own.
        keeps_normed: Whether the residual stream begins behind the norm of hidden states.
    """

    layer: ModelConfig
    name: str
    depths: tuple[int, ...]
    target_size: int
    num_draft_ids: int
    has_ids: bool
    has_embedding: bool
    keeps_normed: bool

    @property
    def join(self) -> WeightRef:
        """Makes hidden states of those of the model."""
        return WeightRef(("model.fc",), (self.layer.hidden_size,), len(self.depths) * self.target_size)

    @property
    def output(self) -> WeightRef:
        """The output head."""
        return WeightRef(("lm_head",), (self.num_draft_ids,), self.layer.hidden_size)

    @property
    def embedding(self) -> WeightRef:
        """Its own one."""
        return WeightRef(("model.embed_tokens",), (self.layer.vocab_size,), self.layer.hidden_size)

    @property
    def spec(self) -> DecoderSpec:
        """Its layer and the norm behind it."""
        layer, hidden = self.layer, self.layer.hidden_size
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        token_norm, hidden_norm, second = (norm_spec(layer, f"{self.name}.{norm}") for norm in norms)
        attention = attention_spec(layer, self.name, 0, None)
        attention = replace(attention, qkv=replace(attention.qkv, in_features=2 * hidden))
        dense = dense_spec(layer, self.name, None)
        block = EagleSpec(token_norm, hidden_norm, attention, second, dense, self.keeps_normed)
        return DecoderSpec(None, (block,), norm_spec(layer, "model.norm"), None)

    def weights_bytes(self, kernels: LayerKernels, dtype: torch.dtype) -> int:
        """Bytes in memory, from the shapes alone."""
        num_bytes = sum(kernels.linear_bytes(matrix, dtype) for matrix in (self.join, self.output))
        num_bytes += self.has_embedding * self.embedding.num_values * dtype.itemsize
        return num_bytes + self.spec.weights_bytes(kernels, dtype)


def eagle_depths(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Behind how many of num_layers layers of the model the inputs of a head are.

    Files name layers, from 0, if the first one named is 1, and else numbers of layers; as SGLang tells them apart.

    Raises:
        ModelError: There are not so many layers.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    named = fields.section("eagle_config").integers(name) or fields.integers(name)
    depths = tuple(depth + (named[0] == 1) for depth in named) or (2, num_layers // 2, num_layers - 3)
    if not all(1 <= depth <= num_layers for depth in depths):
        raise ModelError(f"an EAGLE-3 head that reads behind layers {depths} does not fit a model of {num_layers}")
    return depths


def read_eagle(folder: Path, model: ModelFacts, load_format: LoadFormat) -> EagleConfig:
    """Read the configuration of a head for a model. Without files to look at, a plan takes it to have no embedding.

    Raises:
        ModelError: It is malformed, not supported, or for another model.
    """
    path = folder / "config.json"
    fields = Fields.read(path)
    with understood(path):
        quantization = read_quantization(fields.section("quantization_config"), folder)
        layer = native_config(
            folder, Identity("LlamaForCausalLMEagle3", FAMILIES["LlamaForCausalLM"](fields), fields, quantization)
        )
    assert isinstance(model, ModelConfig)
    if layer.num_layers != 1 or not fields.section("eagle_config").flag("use_aux_hidden_state", True):
        raise ModelError("an EAGLE-3 head of several layers, or one that reads a single layer, is not supported")
    target_size = fields.integer("target_hidden_size", layer.hidden_size)
    sizes, expected = (layer.vocab_size, target_size), (model.vocab_size, model.hidden_size)
    if sizes != expected:
        raise ModelError(
            f"the EAGLE-3 head is for another model: it expects {sizes[0]} token ids and hidden states of {sizes[1]} "
            f"values, the model has {expected[0]} and {expected[1]}"
        )
    names = stored_names(folder, layer, load_format)
    has_embedding = any(name.endswith("embed_tokens.weight") for name in names)
    if layer.hidden_size != model.hidden_size and names and not has_embedding:
        raise ModelError("the EAGLE-3 head has no embedding, and that of the model has another size")
    return EagleConfig(
        layer=layer,
        name="model.layers.0" if any("layers.0." in name for name in names) else "model.midlayer",
        depths=eagle_depths(fields, model.num_layers),
        target_size=target_size,
        num_draft_ids=fields.integer("draft_vocab_size", layer.vocab_size),
        has_ids="d2t" in names,
        has_embedding=has_embedding,
        keeps_normed=fields.flag("norm_before_residual", False),
    )


@dataclass(frozen=True, slots=True)
class EagleBlock(Block):
    """The layer; the hidden states before each token are in `StepCaches.passed`."""

    token_norm: Layer
    hidden_norm: Layer
    mixer: Mixer
    feed_forward_norm: Layer
    feed_forward: FeedForward
    keeps_normed: bool

    @override
    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        (before,) = step.caches.passed[BEFORE]
        normed = self.hidden_norm(before)
        mixed = self.mixer.mix(torch.cat((self.token_norm(hidden), normed), 1), step)
        stream = normed if self.keeps_normed else before
        stream, mixed = (stream.clone(), mixed) if step.rows is None else (stream[step.rows], mixed[step.rows])
        if len(stream):  # an empty launch is an error on CUDA
            self.mixer.add_to(stream, mixed)
            self.feed_forward.add_to(stream, self.feed_forward_norm(stream))
        return stream


@dataclass(frozen=True, slots=True)
class EagleSpec(BlockSpec):
    """`EagleBlock`."""

    token_norm: NormSpec
    hidden_norm: NormSpec
    mixer: AttentionSpec
    feed_forward_norm: NormSpec
    feed_forward: FeedForwardSpec
    keeps_normed: bool

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Block:
        return EagleBlock(
            build_norm(self.token_norm, kernels, reader),
            build_norm(self.hidden_norm, kernels, reader),
            self.mixer.build(kernels, reader, first_cache),
            build_norm(self.feed_forward_norm, kernels, reader),
            self.feed_forward.build(kernels, reader),
            self.keeps_normed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHead(Decoder):
    """A head ready to run; its embedding is `unchanged` if it shares that of the model. What it computes has no norm.

    Attributes:
        join: Makes hidden states of those of the model behind so many layers (depths), beside each other.
        output_norm: Before the output head.
        ids: (num_draft_ids,) int64, the id of the model that each output stands for; None if these are the same.
        vocab_size: Of the model.
    """

    join: Linear
    depths: tuple[int, ...]
    output_norm: Layer
    ids: torch.Tensor | None
    vocab_size: int

    def joined(self, tapped: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Hidden states of the model by number of layers -> (num_tokens, hidden_size)."""
        return self.join(torch.cat([tapped[depth] for depth in self.depths], 1))

    @override
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert self.head is not None
        logits = self.head.to_float32(self.output_norm(hidden_states))
        if self.ids is None:
            return logits
        whole = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        return whole.index_copy_(1, self.ids, logits)


def load_eagle(
    folder: Path,
    progress: Progress,
    *,
    config: EagleConfig,
    kernels: LayerKernels,
    device: torch.device,
    dtype: torch.dtype,
    num_positions: int,
    load_format: LoadFormat,
) -> EagleHead:
    """Load a head; num_positions is the longest context.

    Raises:
        ModelError: The checkpoint does not hold exactly the tensors that config asks for.
    """
    source = open_source(folder, config.layer, device, dtype, load_format, unused=("t2d",))
    spec, layer = config.spec, config.layer
    with torch.inference_mode():
        reader = DenseReader(source, device, dtype, spec.num_parameters * dtype.itemsize, progress)
        rotaries = make_rotaries(layer, num_positions, dtype, device)
        decoder = build_decoder(spec, layer, kernels, reader, rotaries, dtype)
        ids = None
        if config.has_ids:
            offsets = reader.tensor(TensorRef("d2t", (config.num_draft_ids,), dtype=torch.int64))
            ids = offsets + torch.arange(config.num_draft_ids, device=device)
        elif config.num_draft_ids < layer.vocab_size:
            ids = torch.arange(config.num_draft_ids, device=device)
        output = kernels.linear(config.output, reader)
        embedding = kernels.embedding(config.embedding, reader) if config.has_embedding else unchanged
        join = kernels.linear(config.join, reader)
    source.close()
    return EagleHead(
        embedding,
        decoder.blocks,
        unchanged,
        output,
        rotaries,
        decoder.cache_specs,
        config.weights_bytes(kernels, dtype),
        join=join,
        depths=config.depths,
        output_norm=decoder.norm,
        ids=ids,
        vocab_size=layer.vocab_size,
    )
