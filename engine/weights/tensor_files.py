"""Sources of plain tensors: the files of a checkpoint, or random values of the right shapes.

Of files nothing but tensors is read: no code of theirs runs. For a CUDA device tensors go through pinned buffers.
Refuses tensors of another shape than config.json asks for, values that are not numbers, and tensors that have no place
in the model.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from pickle import UnpicklingError
from typing import Protocol
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from typing_extensions import override

from weft.engine.fields import Fields
from weft.engine.weights.reader import Part, TensorSource
from weft.engine.wire.errors import ModelError

_NUM_BUFFERS = 3
_BUFFER_BYTES = 32 << 20


class Event(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def record(self) -> None:
        """Mark this point in the queue of the device."""

    def synchronize(self) -> None:
        """Wait until the device has reached the mark; returns at once if there is none."""


class PinnedUpload:
    """Copies host tensors to the device through pinned buffers; reading a part overlaps with copying another.

    From memory that is not pinned, such as a mapped file, the driver copies through a small buffer of its own while the
    host waits. Here all of torch's threads read a part into a pinned buffer while the device fetches the part before.
    Owns the buffers and uses them in turn.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        buffer_bytes: int = _BUFFER_BYTES,
        make_event: Callable[[], Event] = torch.cuda.Event,
    ) -> None:
        """Allocate the buffers."""
        self._buffer_bytes = buffer_bytes
        is_pinned = device.type == "cuda"
        self._buffers = cycle(
            [
                (torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=is_pinned), make_event())
                for _ in range(_NUM_BUFFERS)
            ]
        )

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a copy from the host to the device; source may be dropped when this returns.

        Both are contiguous and have the same shape. The device converts to the dtype of target.
        """
        stored = target if source.dtype == target.dtype else torch.empty_like(target, dtype=source.dtype)
        for octets, destination in zip(self._parts(source), self._parts(stored), strict=True):
            buffer, is_free = next(self._buffers)
            is_free.synchronize()
            destination.copy_(buffer[: len(octets)].copy_(octets), non_blocking=True)
            is_free.record()
        if stored is not target:
            target.copy_(stored)

    def _parts(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The bytes of a tensor, cut to the size of a buffer."""
        return torch.split(tensor.view(-1).view(torch.uint8), self._buffer_bytes)


_CHECKED = {torch.float32, torch.float16, torch.bfloat16}

_PACKED = ("qweight", "weight_packed", "_weight_qdata")
"""What quantized checkpoints have in place of `weight`."""


class CheckpointSource(TensorSource):
    """The shards of a checkpoint, as safetensors or as files of torch, of which nothing but tensors is read.

    A shard is mapped only while one tensor is copied. Otherwise the mapped pages would add up to a second copy of the
    weights in the process. A checkpoint may leave out the first part of all names, as GPT-2's does.
    """

    def __init__(
        self, folder: Path, device: torch.device, *, is_half: bool = True, unused: tuple[str, ...] = ()
    ) -> None:
        """Find the tensors of a model folder in Hugging Face layout; for CUDA they are copied through pinned memory.

        Args:
            is_half: Only the text half is wanted, under the names that it has alone; False leaves names as they are.
            unused: Beginnings of the names that nobody need ask for.
        """
        shards = self._locate(folder)
        self._stored = _text_half(shards) if is_half else {name: name for name in shards}
        self._shards = shards
        self._upload = PinnedUpload(device) if device.type == "cuda" else None
        self._unread = {name for name in self._stored if not name.startswith(unused)}
        self._pickled: tuple[Path, dict[str, torch.Tensor]] | None = None

    def _locate(self, folder: Path) -> dict[str, Path]:
        """Tensor name -> the file that holds it."""
        return _locate_tensors(folder)

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors that may be read."""
        return tuple(self._stored)

    @override
    def fill(
        self, name: str, target: torch.Tensor, item: tuple[int, int] | None = None, part: Part | None = None
    ) -> None:
        tensor = self._mapped(name)
        shape = [*([item[1]] if item else []), *(part.shape if part else target.shape)]
        if list(tensor.shape) != shape:
            raise misshapen(name, tensor, shape)
        if tensor.dtype.itemsize == 1:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"tensor {name} holds {kind} values, and no quantization_config describes scales of them")
        if item:
            tensor = tensor[item[0]]
        if part:
            tensor = tensor[part.where]
        self._check(name, tensor)
        if self._upload is not None and target.is_cuda:
            self._upload.copy(tensor, target)
        else:
            target.copy_(tensor)
        self._count_read(name)

    @override
    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._mapped(name).shape) if self.has(name) else None

    def dtype(self, name: str) -> torch.dtype:
        """How a tensor is stored."""
        return self._mapped(name).dtype

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return self.name_in_files(name) is not None

    def name_in_files(self, name: str) -> str | None:
        """The whole name of a tensor; None if it does not exist."""
        return self._stored.get(name) or self._stored.get(shortened(name))

    def take(self, name: str) -> torch.Tensor:
        """A tensor as the file has it, mapped; it counts as read."""
        tensor = self._mapped(name)
        self._check(name, tensor)
        self._count_read(name)
        return tensor

    def read(self, name: str) -> torch.Tensor:
        """A tensor in host memory, of the shape and dtype that the file has; the caller owns it."""
        tensor = self._mapped(name)
        self._check(name, tensor)
        return tensor.clone()

    def _mapped(self, name: str) -> torch.Tensor:
        stored = self.name_in_files(name)
        if stored is None:
            others = (name.removesuffix("weight") + ending for ending in _PACKED)
            packed = next(filter(self.has, others), None)
            asked = packed and f", which has {packed}: quantization_config in config.json must say how it is packed"
            raise ModelError(f"tensor {name} is missing from the checkpoint{asked or ''}")
        path = self._shards[stored]
        try:
            tensor = self._unpickle(path)[stored] if path.suffix == ".bin" else _map(path, stored)
        except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, LookupError, UnpicklingError) as error:
            fault = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"{path}: tensor {stored} is not readable ({fault})") from None
        return tensor

    def _count_read(self, name: str) -> None:
        self._unread -= {name, shortened(name)}

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        if tensor.dtype == torch.float8_e4m3fn:
            is_nan = bool((tensor.view(torch.uint8) & 0x7F).max() == 0x7F)
        else:
            is_nan = tensor.dtype in _CHECKED and bool(tensor.max().isnan())  # four times as fast as copying it
        if is_nan:
            stored = self.name_in_files(name)
            assert stored is not None
            raise ModelError(f"{self._shards[stored]}: tensor {stored} holds values that are not numbers (NaN)")

    def _unpickle(self, path: Path) -> dict[str, torch.Tensor]:
        """All tensors of a file of torch, mapped, until another file is read. Runs none of its code."""
        if self._pickled is None or self._pickled[0] != path:
            self._pickled = path, torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return self._pickled[1]

    @override
    def close(self, is_unused: Callable[[str], bool] = lambda name: False) -> None:
        """See `TensorSource`; is_unused says of a name that nobody asked for whether nobody need."""
        refuse_unexpected(name for name in sorted(self._unread) if not is_unused(name))


def misshapen(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> ModelError:
    """The error that names a tensor, its shape and the one that it should have."""
    return ModelError(f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}")


_HARMLESS = (
    "rotary_emb.inv_freq",
    "attn.bias",
    "attn.masked_bias",
    "attention.bias",
    "attention.masked_bias",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "decoder.version",
    "lm_head.weight",
    "embed_out.weight",
    "output_projection.weight",
)
"""Endings of names, of old checkpoints: constants, and the output head of tied ones a second time."""

_OTHER_HEADS = ("mtp.", "model.mtp", "score.")
"""Beginnings of names: heads that predict several tokens, and the head of a classifier, which is read by itself."""


def refuse_unexpected(names: Iterable[str]) -> None:
    """Raise ModelError if the checkpoint has a tensor that no model needs."""
    unexpected = [name for name in names if not name.endswith(_HARMLESS) and not name.startswith(_OTHER_HEADS)]
    if unexpected:
        raise ModelError(f"tensor {min(unexpected)} of the checkpoint has no place in the model")


def shortened(name: str) -> str:
    """A tensor's name without its first part, which some checkpoints leave out."""
    return name.partition(".")[2]


def _map(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as shard:
        tensor: torch.Tensor = shard.get_tensor(name)
    return tensor


_HALF_PREFIXES = ("model.language_model.", "model.text_model.", "language_model.model.", "language_model.")


def text_name(stored: str) -> str | None:
    """The name that a tensor of the text half has alone; None if it belongs to no half."""
    prefix = next((prefix for prefix in _HALF_PREFIXES if stored.startswith(prefix)), None)
    if prefix is None:
        return None
    rest = stored.removeprefix(prefix)
    return rest if rest.startswith("lm_head.") else f"model.{rest}"


def _text_half(shards: Iterable[str]) -> dict[str, str]:
    """Names of the text half alone -> names in the file; all names as they are if the checkpoint has no halves."""
    names = tuple(shards)
    half = {}
    for stored in names:
        name = text_name(stored)
        if name is not None:
            half[name] = stored
    if half and "lm_head.weight" in names:
        half["lm_head.weight"] = "lm_head.weight"
    if half or not any(name.startswith("visual.") for name in names):
        return half or {name: name for name in names}
    return {name: name for name in names if not name.startswith("visual.")}  # Qwen2-VL's first files


_FORMATS = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
"""Of each format the index of a checkpoint in shards, and the only file of another. The first there is counts."""


def _locate_tensors(folder: Path) -> dict[str, Path]:
    for index, single in _FORMATS:
        if (folder / index).exists():
            weight_map = Fields.read(folder / index).section("weight_map")
            return {name: folder / (weight_map.optional_text(name) or "") for name in weight_map.names()}
        if (path := folder / single).exists():
            return dict.fromkeys(_names_in(path), path)
    if any(folder.glob("consolidated*")) or (folder / "original").is_dir():
        raise ModelError(
            f"{folder}: holds the weights in their maker's own format only (consolidated files, original/). Fetch "
            "model*.safetensors of the same repository, or convert them with the script in transformers' folder of "
            "the model (convert_*_weights_to_hf.py)"
        )
    raise ModelError(f"{folder}: neither {_FORMATS[0][1]} nor {_FORMATS[0][0]} (nor pytorch_model.bin)")


def _names_in(path: Path) -> tuple[str, ...]:
    try:
        if path.suffix == ".bin":
            return tuple(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        with safe_open(path, framework="pt") as shard:
            return tuple(shard.keys())
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        fault = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{path}: not readable ({fault})") from None


class RandomSource(TensorSource):
    """Random values, normal with standard deviation 0.02, from a pool that repeats; norms get a constant.

    Repeating a pool is ten times as fast as a random generator. Its length is odd, so that rows differ. Where a tensor
    begins in it follows from its name, so that a part of a tensor has the values that the whole one has there.
    """

    _POOL_SIZE = (1 << 22) + 1

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device, norm_weight: float) -> None:
        """Make the pool; every norm gets norm_weight."""
        generator = torch.Generator().manual_seed(seed)
        self._pool = (torch.randn(self._POOL_SIZE, generator=generator) * 0.02).to(device, dtype)
        self._norm_weight = norm_weight

    @override
    def fill(
        self, name: str, target: torch.Tensor, item: tuple[int, int] | None = None, part: Part | None = None
    ) -> None:
        if name.endswith("norm.weight"):
            target.fill_(self._norm_weight)
            return
        start = crc32(f"{name} {item[0] if item else 0}".encode()) % self._POOL_SIZE
        if part is not None:
            target.copy_(self._part(start, part))
            return
        flat, done = target.view(-1), 0
        while done < len(flat):
            piece = self._pool[start : start + len(flat) - done]
            flat[done : done + len(piece)].copy_(piece)
            done, start = done + len(piece), 0

    def _part(self, start: int, part: Part) -> torch.Tensor:
        """The rows of a matrix, or the only one of a vector, follow each other in the pool."""
        *rows, width = part.shape
        starts = start + width * torch.arange(*rows or (1,), device=self._pool.device)[part.where[0] if rows else 0]
        windows = torch.cat((self._pool, self._pool[:width])).unfold(0, width, 1)
        return windows[starts % self._POOL_SIZE][..., part.where[-1]]

    @override
    def shape(self, name: str) -> None:
        return None

    @override
    def close(self) -> None:
        pass
