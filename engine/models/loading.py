"""Builds a decoder from a checkpoint: its parts are described, then a kit makes layers of them.

The checkpoint's tensors and the description must match exactly. A tensor that is missing, unexpected or of another
shape is a `ModelError` that names it. The load format "dummy" makes random weights of the right shapes without a file.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from weft.engine.describe.specs import DecoderSpec, build_norm
from weft.engine.describe.tensor_names import decoder_spec
from weft.engine.gguf.tensors import GgufSource
from weft.engine.layers.all_ranks import embedding_of_all_ranks, of_all_ids
from weft.engine.layers.block import unchanged
from weft.engine.layers.chained import ChainedLinear, scaled, shifted, soft_cap
from weft.engine.layers.kit import LayerKit
from weft.engine.layers.layer_inputs import beside
from weft.engine.layers.parts import Layer, Linear
from weft.engine.layers.rotary import PositionTable, RotaryTable
from weft.engine.layers.stages import LaterStages, Received, returned
from weft.engine.layers.tuned_attention import TemperatureTable
from weft.engine.models.config import ModelConfig
from weft.engine.models.decoder import Decoder
from weft.engine.models.sharding import shard, whole_parts
from weft.engine.models.stages import ONLY_STAGE, Stage
from weft.engine.shared.errors import ModelError
from weft.engine.weights.decoded import DecodedSource
from weft.engine.weights.formats import DenseReader, Progress, TensorSource, WeightReader
from weft.engine.weights.refs import WeightRef
from weft.engine.weights.tensor_files import CheckpointSource, RandomSource

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]


def load_weights(
    folder: Path,
    config: ModelConfig,
    kit: LayerKit,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress = lambda done, total: None,
    stage: Stage = ONLY_STAGE,
) -> Decoder:
    """Build a decoder from the safetensors in folder, or a rank's part of a stage of it.

    Args:
        folder: Model folder in Hugging Face layout; not read if load_format is "dummy".
        max_model_len: Longest context, in tokens, that positions are prepared for.
        load_format: "dummy" makes random weights.
        progress: Called after every tensor.

    Raises:
        ModelError: The checkpoint does not hold exactly the tensors that config asks for.
    """
    source: TensorSource
    if load_format == "dummy":
        source = RandomSource(seed, dtype, device, norm_weight=1.0 - config.switches.norm_offset)
    else:
        drafts = range(config.num_layers, config.num_layers + config.num_draft_layers)
        layers = config.switches.names.layers
        of_others = stage.unused(decoder_spec(config))
        of_others += tuple(name.partition(".")[2] for name in of_others)  # files may leave out the first part
        unused = *(f"{layers}.{layer}." for layer in drafts), *config.switches.unused, *of_others
        checkpoint = _open(folder, config, device, unused)
        if config.tie_word_embeddings and _has_own_head(config, checkpoint):
            config = replace(config, tie_word_embeddings=False)
        source = DecodedSource(checkpoint, config.quantization, device) if config.quantization else checkpoint
    whole = decoder_spec(config)
    spec = shard(whole, stage.rank, stage.num_ranks)
    if parts := whole_parts(whole, spec) if stage.num_ranks > 1 else None:
        kinds = ", ".join(f"{kind} in {count} layers" for kind, count in parts.items())
        logger.info("whole on every rank, since it cannot be divided: %s", kinds)
    spec = stage.cut(spec)
    with torch.inference_mode():
        reader = DenseReader(source, device, dtype, spec.file_bytes(dtype), progress)
        rotaries = make_rotaries(config, max_model_len, dtype, device)
        decoder = build_decoder(spec, config, kit, reader, rotaries, dtype, stage)
    if stage.is_first and stage.rank == 0:  # which reads some of every tensor that others of its stage read
        source.close()
    return decoder


def lacks_head(folder: Path, config: ModelConfig) -> bool:
    """Whether the files of a checkpoint hold no output head; False where `weft plan` has none of them."""
    try:
        names = _open(folder, config, torch.device("cpu")).names
        return not any(name.startswith(f"{config.switches.names.head}.") for name in names)
    except ModelError:
        return False


def _open(folder: Path, config: ModelConfig, device: torch.device, unused: tuple[str, ...] = ()) -> CheckpointSource:
    is_gguf = config.quantization is not None and config.quantization.method == "gguf"
    return (GgufSource if is_gguf else CheckpointSource)(folder, device, unused=unused)


def _has_own_head(config: ModelConfig, checkpoint: CheckpointSource) -> bool:
    """Whether the output head is stored and is not the embedding, whatever config.json says; as in transformers."""
    head, embedding = f"{config.switches.names.head}.weight", f"{config.switches.names.embedding}.weight"
    shape = checkpoint.shape(head)
    if shape is None or shape != checkpoint.shape(embedding):
        return False
    if torch.equal(checkpoint.read(head), checkpoint.read(embedding)):
        return False
    logger.warning("the output head of the checkpoint is not its embedding, although config.json ties them")
    return True


def make_rotaries(
    config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> tuple[PositionTable, ...]:
    """The tables of all rotary embeddings of a model, then that of temperatures, if it has one."""
    ropes = tuple(
        RotaryTable(rope, rope.head_dim or config.head_dim, max_model_len, dtype, device)
        for rope in config.distinct_ropes
    )
    tuning = config.switches.temperature
    if tuning is None:
        return ropes
    return *ropes, TemperatureTable(tuning.strength, tuning.period, tuning.offset, max_model_len, device)


def build_decoder(
    spec: DecoderSpec,
    config: ModelConfig,
    kit: LayerKit,
    reader: WeightReader,
    rotaries: tuple[PositionTable, ...],
    dtype: torch.dtype,
    stage: Stage = ONLY_STAGE,
) -> Decoder:
    """Load the parts of a spec; config says only how embeddings and logits are scaled and capped."""
    embedding, head = _ends(spec, config, kit, reader, dtype)
    norm = build_norm(spec.norm, kit, reader)
    positions = _position_embedding(spec, kit, reader)
    if positions is not None and config.switches.num_positions_skipped:
        positions = shifted(positions, config.switches.num_positions_skipped)
    built = [block.build(kit, reader, first) for block, first in zip(spec.blocks, spec.first_caches(), strict=True)]
    blocks = kit.fuse(built)
    if not stage.is_first:
        embedding = Received(stage.peer(stage.index - 1), config.hidden_size, dtype)
    if not stage.is_last:
        blocks = [*blocks, LaterStages(stage.peer(stage.index + 1), stage.peer(-1) if stage.is_first else None)]
    elif not stage.is_first:
        norm = returned(stage.peer(0))
    return Decoder(
        embedding,
        blocks,
        norm,
        head,
        rotaries,
        spec.caches,
        spec.weights_bytes(kit, dtype),
        positions,
        build_norm(spec.embedding_norm, kit, reader),
        num_types=spec.token_types.out_features if spec.token_types else 1,
        num_positions=spec.positions.out_features if spec.positions else 0,
    )


def _ends(
    spec: DecoderSpec, config: ModelConfig, kit: LayerKit, reader: WeightReader, dtype: torch.dtype
) -> tuple[Layer, Linear | None]:
    """The embedding of tokens and the output head, which later stages do not have."""
    switches = config.switches
    if spec.embedding is None:
        return unchanged, None
    if spec.head is None:
        embedding, head = kit.tied(spec.embedding, reader)
    else:
        embedding, head = kit.embedding(spec.embedding, reader), kit.linear(spec.head, reader)
    embedding = _of_all_ids(spec.embedding, embedding)
    if switches.embedding_scale != 1.0:
        embedding = scaled(embedding, torch.tensor(switches.embedding_scale, dtype=dtype).item())
    if spec.layer_embedding is not None:
        layers = kit.embedding(spec.layer_embedding, reader)
        embedding = beside(embedding, _of_all_ids(spec.layer_embedding, layers))
    if switches.logit_scale != 1.0:
        head = ChainedLinear(head, scaled(unchanged, switches.logit_scale))
    if switches.logit_soft_cap is not None:
        head = ChainedLinear(head, soft_cap(switches.logit_soft_cap))
    if share := (spec.head or spec.embedding).share:
        head = ChainedLinear(head, of_all_ids(sum(share.sizes)))
    return embedding, head


def _of_all_ids(ref: WeightRef, embedding: Layer) -> Layer:
    """The embedding of all ids; a rank that has only some of them asks the others."""
    return embedding_of_all_ranks(embedding, *ref.share.runs[0]) if ref.share else embedding


def _position_embedding(spec: DecoderSpec, kit: LayerKit, reader: WeightReader) -> Layer | None:
    """The embedding of positions, with that of each type of tokens added to a copy: one addition less in each step."""
    if spec.positions is None or spec.token_types is None:
        return kit.embedding(spec.positions, reader) if spec.positions else None
    positions, types = reader.dense(spec.positions)[0], reader.dense(spec.token_types)[0]
    return partial(F.embedding, weight=(positions + types[:, None]).flatten(0, 1))
