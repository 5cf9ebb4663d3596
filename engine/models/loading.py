"""Builds a decoder from a checkpoint: its parts are described, then `LayerKernels` makes layers of them.

The checkpoint's tensors and the description must match exactly. A tensor that is missing, unexpected or of another
shape is a `ModelError` that names it. The load format "dummy" makes random weights of the right shapes without a file.

`DecodedSource` makes plain weights of what a quantized checkpoint has. `read_kv_scales` reads the scales of K and V
that a checkpoint brings for an fp8 cache.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from weft.engine.cache.specs import PagedKV
from weft.engine.describe.config import ModelConfig
from weft.engine.describe.cut import Cut
from weft.engine.describe.specs import DecoderSpec, build_norm
from weft.engine.gguf.tensors import GgufSource, decode_gguf
from weft.engine.layers.all_ranks import LaterStages, Received, embedding_of_all_ranks, of_all_ids, returned
from weft.engine.layers.block import Decoder, Layer, Linear, unchanged
from weft.engine.layers.encoder_decoder import EncoderDecoder, sine_table
from weft.engine.layers.kernels import LayerKernels
from weft.engine.layers.rotary import PositionTable, RotaryTable
from weft.engine.layers.wrapped_linear import LinearWithEpilogue, added, padded, scaled, shifted, soft_cap
from weft.engine.models.cut import ONLY_STAGE, Stage, shard, whole_parts
from weft.engine.parts.attention import TemperatureTable
from weft.engine.parts.decoder import decoder_spec
from weft.engine.parts.hearing import FrontSpec
from weft.engine.parts.layer_inputs import beside
from weft.engine.weights import methods
from weft.engine.weights.groups import Groups
from weft.engine.weights.quantization import Quantization
from weft.engine.weights.reader import DenseReader, Part, Progress, TensorSource, WeightReader, WeightRef
from weft.engine.weights.tensor_files import CheckpointSource, RandomSource, misshapen
from weft.engine.wire.errors import ModelError

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]


def load_weights(
    folder: Path,
    config: ModelConfig,
    kernels: LayerKernels,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress = lambda done, total: None,
    stage: Stage = ONLY_STAGE,
) -> Decoder | EncoderDecoder:
    """Build a model from the safetensors in folder, or a rank's part of a stage of it.

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
        checkpoint = open_checkpoint(folder, config, device, unused)
        if config.tie_word_embeddings and _has_own_head(config, checkpoint):
            config = replace(config, tie_word_embeddings=False)
        if config.switches.logit_bias and checkpoint.shape(config.switches.logit_bias) is None:
            config = replace(config, switches=replace(config.switches, logit_bias=""))
        source = DecodedSource(checkpoint, config.quantization, device) if config.quantization else checkpoint
    whole = decoder_spec(config)
    spec = shard(whole, stage.rank, stage.num_ranks)
    if parts := whole_parts(whole, spec) if stage.num_ranks > 1 else None:
        kinds = ", ".join(f"{kind} in {count} layers" for kind, count in parts.items())
        logger.info("whole on every rank, since it cannot be divided: %s", kinds)
    spec = stage.cut(spec)
    with torch.inference_mode():
        reader = DenseReader(source, device, dtype, spec.num_parameters * dtype.itemsize, progress)
        rotaries = make_rotaries(config, max_model_len, dtype, device)
        model: Decoder | EncoderDecoder
        model = decoder = build_decoder(spec, config, kernels, reader, rotaries, dtype, stage)
        if spec.encoder is not None and config.encoder is not None:
            rotaries = make_rotaries(config.encoder, max_model_len, dtype, device)
            encoder = build_decoder(spec.encoder, config.encoder, kernels, reader, rotaries, dtype)
            model = _join((encoder, decoder), (config.encoder, config), dtype, device)
            if isinstance(front := spec.encoder.front, FrontSpec):
                model = replace(model, front=front.build(reader, None if load_format == "dummy" else folder, dtype))
    if stage.is_first and stage.rank == 0:  # which reads some of every tensor that others of its stage read
        source.close()
    return model


def _join(
    halves: Sequence[Decoder], configs: Sequence[ModelConfig], dtype: torch.dtype, device: torch.device
) -> EncoderDecoder:
    """Give encoder and decoder their sines, if they have such, and the first the other's embedding, if it lacks one."""
    joined = []
    for half, own in zip(halves, configs, strict=True):
        positions, sinusoid = half.positions, own.switches.sinusoid
        if sinusoid:
            table = sine_table(own.num_positions, own.hidden_size, sinusoid.first, sinusoid.is_of_fairseq)
            positions = partial(F.embedding, weight=table.to(device, dtype))
        embedding = halves[1].embedding if half.embedding is unchanged else half.embedding
        joined.append(replace(half, embedding=embedding, positions=positions))
    return EncoderDecoder(joined[0], joined[1], configs[1].hidden_size, dtype)


def lacks_head(folder: Path, config: ModelConfig) -> bool:
    """Whether the files of a checkpoint hold no output head; False where `weft plan` has none of them."""
    names = stored_names(folder, config)
    return bool(names) and not any(name.startswith(f"{config.switches.names.head}.") for name in names)


def stored_names(folder: Path, config: ModelConfig, load_format: LoadFormat = "auto") -> tuple[str, ...]:
    """Names of the tensors of a checkpoint; none for random weights, or if there are no files, as for a plan."""
    if load_format == "dummy":
        return ()
    try:
        return open_checkpoint(folder, config, torch.device("cpu")).names
    except ModelError:
        return ()


def open_checkpoint(
    folder: Path, config: ModelConfig, device: torch.device, unused: tuple[str, ...] = ()
) -> CheckpointSource:
    """The files of a checkpoint; raises ModelError if there are none."""
    is_gguf = config.quantization is not None and config.quantization.method == "gguf"
    return (GgufSource if is_gguf else CheckpointSource)(folder, device, unused=unused)


def open_source(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat,
    unused: tuple[str, ...] = (),
) -> TensorSource:
    """The tensors of a checkpoint as its config says they are stored, or random ones for the load format "dummy"."""
    if load_format == "dummy":
        return RandomSource(0, dtype, device, norm_weight=1.0 - config.switches.norm_offset)
    checkpoint = open_checkpoint(folder, config, device, unused)
    return DecodedSource(checkpoint, config.quantization, device) if config.quantization else checkpoint


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
        RotaryTable(rope, rope.head_dim or config.head_dim, max_model_len, dtype, device, config.short_context)
        for rope in config.distinct_ropes
    )
    tuning = config.switches.temperature
    if tuning is None:
        return ropes
    return *ropes, TemperatureTable(tuning.strength, tuning.period, tuning.offset, max_model_len, device)


def build_decoder(
    spec: DecoderSpec,
    config: ModelConfig,
    kernels: LayerKernels,
    reader: WeightReader,
    rotaries: tuple[PositionTable, ...],
    dtype: torch.dtype,
    stage: Stage = ONLY_STAGE,
) -> Decoder:
    """Load the parts of a spec; config says only how embeddings and logits are scaled and capped."""
    embedding, head = _ends(spec, config, kernels, reader, dtype)
    norm = build_norm(spec.norm, kernels, reader)
    positions = _position_embedding(spec, kernels, reader)
    if positions is not None and config.switches.num_positions_skipped:
        positions = shifted(positions, config.switches.num_positions_skipped)
    built = [block.build(kernels, reader, first) for block, first in zip(spec.blocks, spec.first_caches(), strict=True)]
    blocks = kernels.fuse(built)
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
        spec.weights_bytes(kernels, dtype),
        positions,
        build_norm(spec.embedding_norm, kernels, reader),
        num_types=spec.token_types.out_features if spec.token_types else 1,
        num_positions=spec.positions.out_features if spec.positions else 0,
    )


def _ends(
    spec: DecoderSpec, config: ModelConfig, kernels: LayerKernels, reader: WeightReader, dtype: torch.dtype
) -> tuple[Layer, Linear | None]:
    """The embedding of tokens and the output head, which later stages do not have."""
    switches = config.switches
    if spec.embedding is None:
        return unchanged, None
    if spec.head is None:
        embedding, head = kernels.tied(spec.embedding, reader)
    else:
        embedding, head = kernels.embedding(spec.embedding, reader), kernels.linear(spec.head, reader)
    embedding = _of_all_ids(spec.embedding, embedding)
    if switches.embedding_scale != 1.0:
        embedding = scaled(embedding, torch.tensor(switches.embedding_scale, dtype=dtype).item())
    if spec.layer_embedding is not None:
        layers = kernels.embedding(spec.layer_embedding, reader)
        embedding = beside(embedding, _of_all_ids(spec.layer_embedding, layers))
    if switches.logit_scale != 1.0:
        head = LinearWithEpilogue(head, scaled(unchanged, switches.logit_scale))
    if switches.logit_soft_cap is not None:
        head = LinearWithEpilogue(head, soft_cap(switches.logit_soft_cap))
    if share := (spec.head or spec.embedding).share:
        head = LinearWithEpilogue(head, of_all_ids(sum(share.sizes)))
    if spec.logit_bias is not None and not (share and share.runs[0].first):  # others have logits of some ids
        head = LinearWithEpilogue(head, added(reader.tensor(spec.logit_bias)))
    if switches.num_unwritten_ids:
        head = LinearWithEpilogue(head, padded(switches.num_unwritten_ids))
    return embedding, head


def _of_all_ids(ref: WeightRef, embedding: Layer) -> Layer:
    """The embedding of all ids; a rank that has only some of them asks the others."""
    return embedding_of_all_ranks(embedding, *ref.share.runs[0]) if ref.share else embedding


def _position_embedding(spec: DecoderSpec, kernels: LayerKernels, reader: WeightReader) -> Layer | None:
    """The embedding of positions, with that of each type of tokens added to a copy: one addition less in each step."""
    if spec.positions is None or spec.token_types is None:
        return kernels.embedding(spec.positions, reader) if spec.positions else None
    positions, types = reader.dense(spec.positions)[0], reader.dense(spec.token_types)[0]
    return partial(F.embedding, weight=(positions + types[:, None]).flatten(0, 1))


_DECODERS: Mapping[str, Callable[[methods.StoredWeight], Groups | None]] = {
    "fp8": methods.decode_fp8,
    "compressed-tensors": methods.decode_compressed_tensors,
    "gptq": methods.decode_gptq,
    "awq": methods.decode_awq,
    "mxfp4": methods.decode_mxfp4,
    "bitsandbytes": methods.decode_bitsandbytes,
    "torchao": methods.decode_torchao,
    "modelopt": methods.decode_modelopt,
    "gguf": decode_gguf,
}

_UNUSED_ENDINGS = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".input_scale_ub", ".activation_scale"),
    *(".output_scale", ".output_zero_point", ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".weight_format"),
)
"""Endings of names: scales of activations, which are not quantized by them, and of K and V (`read_kv_scales`)."""


class DecodedSource(TensorSource):
    """A quantized checkpoint, of which each rank decodes whole matrices, one at a time, on its device.

    The decoder of its method makes plain weights of what is there.
    """

    def __init__(self, checkpoint: CheckpointSource, quantization: Quantization, device: torch.device) -> None:
        """Decode what the checkpoint has quantized; the rest is read as it is."""
        self._checkpoint, self._quantization, self._device = checkpoint, quantization, device
        self._decode = _DECODERS[quantization.method]

    @override
    def groups(self, name: str, shape: tuple[int, int], item: tuple[int, int] | None = None) -> Groups | None:
        return self._decode(methods.StoredWeight(self._checkpoint, self._quantization, self._device, name, shape, item))

    @override
    def fill(self, name: str, target: Tensor, item: tuple[int, int] | None = None, part: Part | None = None) -> None:
        shape = part.shape if part else tuple(target.shape)
        groups = self.groups(name, (shape[0], shape[1]), item) if len(shape) == 2 else None
        if groups is None:
            self._checkpoint.fill(name, target, item, part)
        else:
            weight = groups.dequantize(target.dtype)
            target.copy_(weight[part.where] if part else weight)

    @override
    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._checkpoint.shape(name)

    @override
    def on_host(self) -> "DecodedSource":
        return DecodedSource(self._checkpoint, self._quantization, torch.device("cpu"))

    @override
    def close(self) -> None:
        self._checkpoint.close(self._is_unused)

    def _is_unused(self, name: str) -> bool:
        """AutoGPTQ also writes biases of zeros, of matrices that have none."""
        if name.endswith(".bias") and self._checkpoint.has(f"{name.removesuffix('.bias')}.qweight"):
            return not self._checkpoint.take(name).any()
        return name.endswith(_UNUSED_ENDINGS)


_KV_SCALE_PLACES = (
    *(".{}_scale", ".attn.{}_scale", ".{}_proj.{}_scale", ".qkv_proj.{}_scale", ".{}_proj.output_scale"),
    ".kv_scale",
)
"""Of the scale of k or of v, in the module of the projections.

llm-compressor and AutoFP8 put them beside the projections (`self_attn.k_scale`; one `kv_scale` for both), which vLLM's
own files call `attn.k_scale`; ModelOpt, older llm-compressor and Quark inside of them (`k_proj.k_scale`,
`k_proj.output_scale`). In all of them K is the scale times what is kept.
"""


def read_kv_scales(folder: Path, whole: DecoderSpec, own: DecoderSpec, cut: Cut) -> dict[int, Tensor]:
    """(2, num_kv_heads) float32, of K and of V, by the index of the cache; layers without scales are left out.

    A checkpoint has one of each for a layer, or one for each head.

    Args:
        whole: The stage with all heads.
        own: The same with the heads of this rank.
        cut: Which these are.

    Raises:
        ModelError: A tensor has another shape, or a scale is not a positive number.
    """
    checkpoint, scales = CheckpointSource(folder, torch.device("cpu")), dict[int, Tensor]()
    for block, first in zip(whole.blocks, whole.first_caches(), strict=True):
        matrices = (ref for ref in block.weights if isinstance(ref, WeightRef))
        modules = dict.fromkeys(name.rpartition(".")[0] for matrix in matrices for name in matrix.names)
        for index, (cache, of_rank) in enumerate(zip(block.caches, own.caches[first:], strict=False), first):
            if not isinstance(cache, PagedKV) or not isinstance(of_rank, PagedKV) or cache.latent_dim is not None:
                continue
            sides = [_read_kv_scale(checkpoint, modules, side, cache.num_kv_heads) for side in "kv"]
            if any(side is not None for side in sides):
                ones = torch.ones(cache.num_kv_heads)
                both = torch.stack([ones if side is None else side for side in sides])
                is_divided = of_rank.num_kv_heads < cache.num_kv_heads
                heads = cut.run(cache.num_kv_heads) if is_divided else (0, cache.num_kv_heads)
                scales[index] = both.narrow(1, *heads).contiguous()
    if scales and not cut.rank:
        logger.info("K and V of %d layers are rounded to fp8 by the checkpoint's scales", len(scales))
    return scales


def _read_kv_scale(checkpoint: CheckpointSource, modules: Iterable[str], side: str, num_heads: int) -> Tensor | None:
    """(num_heads,) for a side, k or v; None if no module has a scale of it."""
    names = (module + place.format(side, side) for module in modules for place in _KV_SCALE_PLACES)
    name = next(filter(checkpoint.has, names), None)
    if name is None:
        return None
    stored = checkpoint.take(name)
    if stored.numel() not in (1, num_heads):
        raise misshapen(name, stored, (num_heads,))
    values = stored.float().flatten()
    if not (values.isfinite() & (values > 0)).all():
        raise ModelError(f"tensor {name} must hold positive numbers, scales of a KV cache, got {values.min():g}")
    return values.expand(num_heads)
