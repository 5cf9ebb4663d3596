"""Sources of plain tensors: safetensors files, or random values of the right shapes."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from typing_extensions import override

from weft.engine.models.families.fields import Fields
from weft.engine.shared.errors import ModelError
from weft.engine.weights.formats import TensorSource
from weft.engine.weights.upload import PinnedUpload

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class SafetensorsSource(TensorSource):
    """The shards of a checkpoint.

    A shard is mapped only while one tensor is copied. Otherwise the mapped pages would add up to a second copy of the
    weights in the process.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Find the tensors of a model folder in Hugging Face layout; for CUDA they are copied through pinned memory."""
        self._shards = _locate_tensors(folder)
        self._upload = PinnedUpload(device) if device.type == "cuda" else None
        self._unread = set(self._shards)

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors of the checkpoint."""
        return tuple(self._shards)

    @override
    def fill(self, name: str, target: torch.Tensor, item: tuple[int, int] | None = None) -> None:
        tensor = self._mapped(name)
        shape = [*([item[1]] if item else []), *target.shape]
        if list(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {shape}")
        if item:
            tensor = tensor[item[0]]
        if self._upload is not None:
            self._upload.copy(tensor, target)
        else:
            target.copy_(tensor)
        self._unread.discard(name)

    def read(self, name: str) -> torch.Tensor:
        """A tensor in host memory, of the shape and dtype that the file has; the caller owns it."""
        return self._mapped(name).clone()

    def _mapped(self, name: str) -> torch.Tensor:
        path = self._shards.get(name)
        if path is None:
            raise ModelError(f"tensor {name} is missing from the checkpoint")
        try:
            with safe_open(path, framework="pt") as shard:
                tensor: torch.Tensor = shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: tensor {name} is not readable ({error})") from None
        return tensor

    @override
    def close(self) -> None:
        refuse_unexpected(self._unread)


def refuse_unexpected(names: Iterable[str]) -> None:
    """Raise ModelError if the checkpoint has a tensor that no model needs."""
    # Old checkpoints store the inverse frequencies. Tied ones may store the output head a second time.
    unexpected = [name for name in names if not name.endswith(("rotary_emb.inv_freq", "lm_head.weight"))]
    if unexpected:
        raise ModelError(f"tensor {min(unexpected)} of the checkpoint has no place in the model")


def _locate_tensors(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
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


class RandomSource(TensorSource):
    """Random values, normal with standard deviation 0.02, from a pool that repeats; norms get a constant.

    Repeating a pool is ten times as fast as a random generator. Its length is odd, so that rows differ.
    """

    _POOL_SIZE = (1 << 22) + 1

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device, norm_weight: float) -> None:
        """Make the pool; every norm gets norm_weight."""
        generator = torch.Generator().manual_seed(seed)
        self._pool = (torch.randn(self._POOL_SIZE, generator=generator) * 0.02).to(device, dtype)
        self._offset = 0
        self._norm_weight = norm_weight

    @override
    def fill(self, name: str, target: torch.Tensor, item: tuple[int, int] | None = None) -> None:
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

    @override
    def close(self) -> None:
        pass
