"""Weights: safetensors -> a `Decoder` on its device.

Every tensor is copied from the file straight to its place on the device (on CUDA through pinned memory, while the next
is read), fused matrices slice by slice, and each linear layer is packed as soon as it is complete; so memory holds the
weights once, plus one matrix. A tensor that is missing, superfluous or of another shape is a `ModelError` that names
it. The load format "dummy" makes random weights of the right shapes without a file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.layers.chained import ChainedLinear, scaled, soft_cap
from engine.layers.kit import LayerKit, embedding
from engine.layers.norm import HeadNorm
from engine.layers.rotary import RotaryTable
from engine.layers.stack import DecoderLayer, Layer, Linear
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderWeights
from engine.models.errors import ModelError
from engine.models.fields import Fields
from engine.upload import PinnedUpload

LoadFormat = Literal["auto", "dummy"]
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total, as they are on the device."""

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


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
    progress: Progress | None = None,
) -> Decoder:
    """Build a decoder from the safetensors in folder.

    Args:
        folder: Model folder in Hugging Face layout; not read when load_format is "dummy".
        max_model_len: Longest context, in tokens, that positions are prepared for.
        load_format: "dummy" makes random weights.
        progress: Told after every tensor; None tells nobody.

    Raises:
        ModelError: The checkpoint does not hold exactly the tensors that config asks for.
    """
    source: _TensorSource
    if load_format == "dummy":
        source = _RandomSource(seed, dtype, device, norm_weight=1.0 - config.norm_offset)
    else:
        source = _SafetensorsSource(folder, device)
    total_bytes = config.num_parameters * dtype.itemsize
    loader = _Loader(config, kit, source, device, dtype, progress, total_bytes)
    with torch.inference_mode():
        decoder = loader.load(max_model_len)
    source.close()
    return decoder


def count_weights_bytes(config: ModelConfig, kit: LayerKit, dtype: torch.dtype) -> int:
    """Bytes that `load_weights` takes, from the shapes alone."""
    num_values = config.num_parameters
    if config.tie_word_embeddings and kit.copies_tied_table:
        num_values += config.vocab_size * config.hidden_size
    num_bytes = num_values * dtype.itemsize
    if config.norm_offset:
        num_bytes += config.num_norm_parameters * (torch.float32.itemsize - dtype.itemsize)
    if kit.is_int8:
        num_bytes -= sum(rows * (columns * (dtype.itemsize - 1) - 4) for rows, columns in config.matrix_shapes)
    return num_bytes


class _TensorSource(Protocol):
    """Where tensors come from."""

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Copy the tensor into target; raises ModelError when it does not exist or has another shape."""

    def close(self) -> None:
        """End of loading; raises ModelError when tensors are left that nobody asked for."""


class _SafetensorsSource:
    """The shards of a checkpoint.

    A shard is mapped only while one tensor is copied, so that pages of the file do not add up to a second copy of
    the weights in the process.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._shards = _locate_tensors(folder)
        self._upload = PinnedUpload(device) if device.type == "cuda" else None
        self._unread = set(self._shards)

    def fill(self, name: str, target: torch.Tensor) -> None:
        path = self._shards.get(name)
        if path is None:
            raise ModelError(f"tensor {name} is missing from the checkpoint")
        try:
            with safe_open(path, framework="pt") as shard:
                tensor = shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: tensor {name} is not readable ({error})") from None
        if tensor.shape != target.shape:
            raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(target.shape)}")
        if self._upload is not None:
            self._upload.copy(tensor, target)
        else:
            target.copy_(tensor)
        self._unread.discard(name)

    def close(self) -> None:
        # Old checkpoints store the inverse frequencies; tied ones may store the output head a second time.
        unexpected = [
            name for name in self._unread if not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight"
        ]
        if unexpected:
            raise ModelError(f"tensor {min(unexpected)} of the checkpoint has no place in the model")


def _locate_tensors(folder: Path) -> dict[str, Path]:
    """Tensor name -> file that holds it."""
    if (folder / _INDEX).exists():
        weight_map = Fields.read(folder / _INDEX).section("weight_map")
        return {name: folder / (weight_map.optional_text(name) or "") for name in weight_map.names()}
    path = folder / _SINGLE
    if not path.exists():
        raise ModelError(f"{folder}: neither {_SINGLE} nor {_INDEX} (only safetensors are read)")
    try:
        with safe_open(path, framework="pt") as shard:
            return dict.fromkeys(shard.keys(), path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: not readable as safetensors ({error})") from None


class _RandomSource:
    """Noise: norms are given, all else is normal with standard deviation 0.02, from one pool that repeats.

    Repeating the pool is an order of magnitude faster than a random generator; its length is odd, so rows differ.
    """

    _POOL_SIZE = (1 << 22) + 1

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device, norm_weight: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._pool = (torch.randn(self._POOL_SIZE, generator=generator) * 0.02).to(device, dtype)
        self._offset = 0
        self._norm_weight = norm_weight

    def fill(self, name: str, target: torch.Tensor) -> None:
        if name.endswith("norm.weight"):
            target.fill_(self._norm_weight)
            return
        flat = target.view(-1)
        start = 0
        while start < len(flat):
            piece = self._pool[self._offset : self._offset + len(flat) - start]
            flat[start : start + len(piece)].copy_(piece)
            start += len(piece)
            self._offset = (self._offset + len(piece)) % self._POOL_SIZE

    def close(self) -> None:
        pass


class _Loader:
    """Knows the tensor names of a checkpoint and where each goes."""

    def __init__(
        self,
        config: ModelConfig,
        kit: LayerKit,
        source: _TensorSource,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None,
        total_bytes: int,
    ) -> None:
        self._config = config
        self._kit = kit
        self._source = source
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._done_bytes, self._total_bytes = 0, total_bytes

    def load(self, max_model_len: int) -> Decoder:
        config = self._config
        rotary = RotaryTable(config.rope, config.head_dim, max_model_len, self._dtype, self._device)
        lookup, head = self._table_and_head()
        if config.embedding_scale != 1.0:
            lookup = scaled(lookup, torch.tensor(config.embedding_scale, dtype=self._dtype).item())
        if config.logit_soft_cap is not None:
            head = ChainedLinear(head, soft_cap(config.logit_soft_cap))
        layers = tuple(self._layer(f"model.layers.{index}.") for index in range(config.num_layers))
        norm = self._norm("model.norm.weight", config.hidden_size)
        num_bytes = count_weights_bytes(config, self._kit, self._dtype)
        stack = self._kit.stack(layers, config.head_dim)
        return Decoder(config, DecoderWeights(lookup, stack, norm, head, rotary, num_bytes))

    def _table_and_head(self) -> tuple[Layer, Linear]:
        config = self._config
        table = self._tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            return self._kit.tied(table)
        return embedding(table), self._linear(("lm_head",), config.hidden_size, (config.vocab_size,), has_bias=False)

    def _layer(self, prefix: str) -> DecoderLayer:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv_names = tuple(f"{attention}{part}_proj" for part in "qkv")
        gate_up = self._stacked((f"{mlp}gate_proj", f"{mlp}up_proj"), hidden, (inner, inner), config.mlp_bias)
        gated = self._kit.gated(*gate_up, config.activation)
        del gate_up  # or the plain weight would outlive packing
        norm = "pre_feedforward_layernorm" if config.has_post_norms else "post_attention_layernorm"
        head_norm = self._head_norm(attention) if config.qk_norm else None
        return DecoderLayer(
            input_norm=self._norm(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._linear(qkv_names, hidden, (query_size, kv_size, kv_size), config.qkv_bias),
            heads=self._kit.heads(head_norm, config.num_heads, config.num_kv_heads),
            o=self._branch_end(f"{attention}o_proj", query_size, config.o_bias, f"{prefix}post_attention_layernorm"),
            mlp_norm=self._norm(f"{prefix}{norm}.weight", hidden),
            gated=gated,
            down=self._branch_end(f"{mlp}down_proj", inner, config.mlp_bias, f"{prefix}post_feedforward_layernorm"),
        )

    def _branch_end(self, name: str, in_features: int, has_bias: bool, norm: str) -> Linear:
        """What adds to the hidden states; `norm` is there in families with post norms."""
        hidden = self._config.hidden_size
        linear = self._linear((name,), in_features, (hidden,), has_bias)
        if not self._config.has_post_norms:
            return linear
        return ChainedLinear(linear, self._norm(f"{norm}.weight", hidden))

    def _head_norm(self, prefix: str) -> HeadNorm:
        config = self._config
        query = self._tensor(f"{prefix}q_norm.weight", config.head_dim)
        key = self._tensor(f"{prefix}k_norm.weight", config.head_dim)
        return HeadNorm(query, key, config.num_heads, config.num_kv_heads, config.rms_norm_eps)

    def _norm(self, name: str, size: int) -> Layer:
        weight = self._tensor(name, size)
        if self._config.norm_offset:  # in float32: near 1, a 16-bit type keeps fewer digits of a weight than near 0
            weight = weight.float() + self._config.norm_offset
        return self._kit.norm(weight, self._config.rms_norm_eps)

    def _linear(self, names: tuple[str, ...], in_features: int, sizes: tuple[int, ...], has_bias: bool) -> Linear:
        return self._kit.linear(*self._stacked(names, in_features, sizes, has_bias))

    def _stacked(
        self, names: tuple[str, ...], in_features: int, sizes: tuple[int, ...], has_bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of several projections, stacked along the outputs."""
        weight = torch.empty(sum(sizes), in_features, dtype=self._dtype, device=self._device)
        bias = torch.empty(sum(sizes), dtype=self._dtype, device=self._device) if has_bias else None
        for index, name in enumerate(names):
            rows = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
            self._fill(f"{name}.weight", weight[rows])
            if bias is not None:
                self._fill(f"{name}.bias", bias[rows])
        return weight, bias

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._fill(name, tensor)
        return tensor

    def _fill(self, name: str, target: torch.Tensor) -> None:
        self._source.fill(name, target)
        self._done_bytes += target.nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
