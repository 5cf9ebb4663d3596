"""The head for a second next token that some checkpoints bring (multi-token prediction), and how it is loaded.

It is one more layer behind the model's last one. At a position it reads the model's hidden states there, behind the
final norm, and the embedding of the next token, and predicts the token behind that (DeepSeek-AI, DeepSeek-V3, 2024,
section 2.2). So it is described as a decoder: `Join` makes hidden states of the two, a layer like the model's last one
follows, then a norm. Embedding, output head and rotary tables are those of the model; copies of these in the checkpoint
are not read. Of several heads only the first is used, again and again.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from typing_extensions import override

from weft.engine.describe.config import ModelConfig
from weft.engine.describe.specs import BlockSpec, DecoderSpec, NormSpec
from weft.engine.describe.tensor_names import norm_spec
from weft.engine.layers.block import Block, BlockStep, Decoder, Layer, Linear, unchanged
from weft.engine.layers.kernels import LayerKernels
from weft.engine.models.loading import LoadFormat, build_decoder, open_source, stored_names
from weft.engine.parts.decoder import block_spec
from weft.engine.weights.reader import DenseReader, Progress, WeightReader, WeightRef
from weft.engine.wire.errors import ModelError

BEFORE = "hidden states before"
"""In `StepCaches.passed` of a head: (num_tokens, hidden_size), those of the token before each."""


@dataclass(frozen=True, slots=True)
class Join(Block):
    """Makes hidden states of embeddings and of the hidden states of the tokens before them.

    Attributes:
        projection: (hidden_size, 2 * hidden_size), embeddings first.
    """

    token_norm: Layer
    hidden_norm: Layer
    projection: Linear

    @override
    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        (before,) = step.caches.passed[BEFORE]
        return self.projection(torch.cat((self.token_norm(hidden), self.hidden_norm(before)), 1))


@dataclass(frozen=True, slots=True)
class JoinSpec(BlockSpec):
    """`Join`."""

    token_norm: NormSpec
    hidden_norm: NormSpec
    projection: WeightRef

    @override
    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Block:
        token_norm, hidden_norm = self.token_norm.build(kernels, reader), self.hidden_norm.build(kernels, reader)
        return Join(token_norm, hidden_norm, kernels.linear(self.projection, reader))


def head_spec(config: ModelConfig) -> DecoderSpec:
    """The first head, without what it shares with the model."""
    layer, hidden = _layer(config), config.hidden_size
    token_norm, hidden_norm, norm = (norm_spec(config, f"{layer}.{n}") for n in ("enorm", "hnorm", "shared_head.norm"))
    join = JoinSpec(token_norm, hidden_norm, WeightRef((f"{layer}.eh_proj",), (hidden,), 2 * hidden))
    return DecoderSpec(None, (join, block_spec(config, config.num_layers - 1, layer)), norm, None)


def _layer(config: ModelConfig) -> str:
    return f"{config.switches.names.layers}.{config.num_layers}"


def check_head(folder: Path, config: ModelConfig, load_format: LoadFormat) -> None:
    """Refuse a checkpoint without a head, by config.json and the names of tensors. A plan may have no files to look at.

    Raises:
        ModelError: There is none, or none that is known.
    """
    if not config.num_draft_layers:
        raise ModelError(
            "speculative mtp needs a checkpoint with heads that predict several tokens, and config.json has none "
            "(num_nextn_predict_layers)"
        )
    if not config.switches.has_draft_heads:
        raise ModelError(f"speculative mtp: the heads of {config.architecture} are not supported")
    names = stored_names(folder, config, load_format)
    if names and not any(name.startswith(f"{_layer(config)}.eh_proj.") for name in names):
        raise ModelError(
            f"speculative mtp: config.json names a head, but the checkpoint has no {_layer(config)}.eh_proj"
        )


def load_head(
    folder: Path,
    progress: Progress,
    *,
    config: ModelConfig,
    kernels: LayerKernels,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat,
) -> Decoder:
    """Load the head of a model folder; `beside` gives it what it shares with the model.

    Raises:
        ModelError: A tensor is missing or of another shape.
    """
    source, spec = open_source(folder, config, device, dtype, load_format), head_spec(config)
    with torch.inference_mode():
        reader = DenseReader(source, device, dtype, spec.num_parameters * dtype.itemsize, progress)
        return build_decoder(spec, config, kernels, reader, (), dtype)


def beside(head: Decoder, model: Decoder) -> Decoder:
    """A head with what it shares with its model: what it has not of its own."""
    embedding = model.embedding if head.embedding is unchanged else head.embedding
    return replace(head, embedding=embedding, head=head.head or model.head, rotaries=head.rotaries or model.rotaries)
