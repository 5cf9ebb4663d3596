"""GGUF: tensors under the names of Hugging Face checkpoints, and groups of what llama.cpp's types pack in blocks.

`folder.py` has made a folder whose config.json says where every tensor lies, of which type it is, and what its
converter changed. Layouts: github.com/ggml-org/llama.cpp, `ggml/src/ggml-common.h`.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from weft.engine.fields import Fields
from weft.engine.weights.groups import Groups
from weft.engine.weights.methods import StoredWeight
from weft.engine.weights.tensor_files import CheckpointSource, misshapen
from weft.engine.wire.errors import ModelError

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_CHUNK_VALUES = 1 << 21
"""Decoded at once: few, so that they stay in the caches of a CPU."""

Blocks = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Values, scales and offsets, by output, block, and place in the block."""


class GgufSource(CheckpointSource):
    """The tensors of GGUF files; those of the text half that are of block types are bytes (outputs, bytes of a row)."""

    def __init__(
        self, folder: Path, device: torch.device, *, is_half: bool = True, unused: tuple[str, ...] = ()
    ) -> None:
        """See `CheckpointSource`; the folder is one that `folder.py` has made."""
        config = Fields.read(folder / "config.json").section("quantization_config")
        self._files = tuple(map(Path, config.texts("files")))
        for file, version in zip(self._files, config.texts("versions"), strict=True):
            if _version(file) != version:
                raise ModelError(f"{file} is not the file that the server found when it started; start it again")
        halves = [config.section(name) for name in ("tensors", *(() if is_half else ("seeing",)))]
        self._tensors = {name: half.section(name) for half in halves for name in half.names()}
        super().__init__(folder, device, is_half=is_half, unused=unused)

    @override
    def _locate(self, folder: Path) -> dict[str, Path]:
        return {name: self._files[tensor.integer("file")] for name, tensor in self._tensors.items()}

    @override
    def name_in_files(self, name: str) -> str | None:
        return super().name_in_files(_EXPERT.sub(".experts.{}.", name))

    @override
    def shape(self, name: str) -> tuple[int, ...] | None:
        stored = self.name_in_files(name)
        return self._tensors[stored].integers("shape")[bool(_EXPERT.search(name)) :] if stored else None

    @override
    def _count_read(self, name: str) -> None:
        self._unread.discard(self.name_in_files(name) or name)

    @override
    def _mapped(self, name: str) -> torch.Tensor:
        stored = self.name_in_files(name)
        if stored is None:
            raise ModelError(f"tensor {name} is missing from the GGUF file")
        tensor = self._tensors[stored]
        if parts := tensor.section("parts").names():  # of the half that sees
            placed = [tensor.section("parts").section(part) for part in parts]
            plain = [_plain(self._values(part, stored), part) for part in placed]
            whole = torch.stack(plain, 2) if len(plain) > 1 and plain[0].dim() == 4 else torch.cat(plain)
            return whole.view(tensor.integers("shape"))
        values = self._values(tensor, stored)
        if expert := _EXPERT.search(name):
            if int(expert[1]) >= len(values):
                raise ModelError(f"tensor {name} is missing from the GGUF file, which has {len(values)} experts")
            values = values[int(expert[1])]
        return values

    def _values(self, tensor: Fields, stored: str) -> torch.Tensor:
        """What lies in one place, mapped unless something has to be undone."""
        *outer, _ = shape = tensor.integers("shape")
        kind, path = tensor.optional_text("type"), self._files[tensor.integer("file")]
        try:
            mapped = np.memmap(path, np.uint8, "c", tensor.integer("offset"), (*outer, tensor.integer("row_bytes")))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: tensor {stored} is not readable ({error})") from None
        values = torch.from_numpy(mapped)
        if kind in _PLAIN:
            values = values.view(_PLAIN[kind]).view(shape)
        if heads := tensor.integer("heads", 0):  # the halves of each head lie in turn
            values = values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        if less := tensor.number("less", 0.0):
            values = values.float() - less
        return values


def _plain(values: torch.Tensor, tensor: Fields) -> torch.Tensor:
    """The values of a tensor in one place, of a block type in float32."""
    if (kind := tensor.optional_text("type") or "") in _PLAIN:
        return values
    *outer, inputs = tensor.integers("shape")
    size, decode_blocks = _TYPES[kind]
    numbers, scales, offsets = decode_blocks(values.reshape(-1, inputs // size, values.shape[-1] * size // inputs))
    grouped = numbers.float().view(*scales.shape, -1) * scales[..., None]
    if offsets is not None:
        grouped -= offsets[..., None]
    return grouped.reshape(*outer, inputs)


def _version(file: Path) -> str:
    """As `folder.py` writes it."""
    try:
        stat = file.stat()
    except OSError as error:
        raise ModelError(f"{file}: not readable ({error.strerror})") from None
    return f"{stat.st_size} {stat.st_mtime_ns}"


def decode_gguf(weight: StoredWeight) -> Groups | None:
    """The weight; None if it is not quantized."""
    scheme = weight.quantization.expected(weight.module)
    if scheme is None:
        return None
    outputs, inputs = weight.shape
    size, decode_blocks = _TYPES[scheme.label]
    shape = weight.checkpoint.shape(weight.name)
    expected = (*([weight.item[1]] if weight.item else []), outputs, inputs)
    if shape != expected:
        raise misshapen(weight.name, torch.empty(shape or (), device="meta"), expected)
    blocks = weight.take(weight.name).reshape(outputs, inputs // size, -1)
    values = torch.empty(outputs, inputs, dtype=torch.int8, device=weight.device)
    scales, offsets, done = [], [], 0
    for part in torch.split(blocks, max(1, _CHUNK_VALUES // inputs)):
        decoded = decode_blocks(part)
        values[done : done + len(part)] = decoded[0].flatten(1)
        scales.append(decoded[1].flatten(1))
        offsets += [] if decoded[2] is None else [decoded[2].flatten(1)]
        done += len(part)
    all_offsets = torch.cat(offsets) if offsets else None
    group_size = scheme.group_size or inputs
    return Groups(values, torch.cat(scales), None, scheme.bits, group_size, offsets=all_offsets)


def _halves(octets: torch.Tensor) -> torch.Tensor:
    return octets.contiguous().view(torch.float16).float()


def _fields(octets: torch.Tensor, run: int, bits: int) -> torch.Tensor:
    """Of each run of octets the lowest bits of all, then the next bits of all, and so on."""
    runs, word, lowest = octets.reshape(*octets.shape[:-1], -1, 1, run), torch.uint8, (1 << bits) - 1
    if run % 8 == 0:  # eight at once
        runs, word, lowest = runs.contiguous().view(torch.int64), torch.int64, lowest * 0x0101010101010101
    shifts = torch.arange(0, 8, bits, dtype=word, device=octets.device)[:, None]
    return (runs >> shifts).bitwise_and_(lowest).flatten(-3).view(torch.uint8)


def _bits(octets: torch.Tensor) -> torch.Tensor:
    """Those of each octet, lowest first."""
    return _fields(octets, 1, 1)


def _q4_0(blocks: torch.Tensor) -> Blocks:
    return (_fields(blocks[..., 2:], 16, 4) - 8).view(torch.int8), _halves(blocks[..., :2]), None  # wraps


def _q4_1(blocks: torch.Tensor) -> Blocks:
    return _fields(blocks[..., 4:], 16, 4), _halves(blocks[..., :2]), -_halves(blocks[..., 2:4])


def _q5_0(blocks: torch.Tensor) -> Blocks:
    values = _fields(blocks[..., 6:], 16, 4) | _bits(blocks[..., 2:6]) << 4
    return (values - 16).view(torch.int8), _halves(blocks[..., :2]), None


def _q5_1(blocks: torch.Tensor) -> Blocks:
    values = _fields(blocks[..., 8:], 16, 4) | _bits(blocks[..., 4:8]) << 4
    return values, _halves(blocks[..., :2]), -_halves(blocks[..., 2:4])


def _q8_0(blocks: torch.Tensor) -> Blocks:
    return blocks[..., 2:].view(torch.int8), _halves(blocks[..., :2]), None


def _q2_k(blocks: torch.Tensor) -> Blocks:
    packed, scale, least = blocks[..., :16], _halves(blocks[..., 80:82]), _halves(blocks[..., 82:])
    return _fields(blocks[..., 16:80], 32, 2), scale * (packed & 15).float(), least * (packed >> 4).float()


def _q3_k(blocks: torch.Tensor) -> Blocks:
    scales = _fields(blocks[..., 96:104], 8, 4) | _fields(blocks[..., 104:108], 4, 2) << 4
    values = _fields(blocks[..., 32:96], 32, 2) | _fields(blocks[..., :32], 32, 1) << 2
    return (values - 4).view(torch.int8), _halves(blocks[..., 108:]) * (scales.float() - 32), None


def _scales_and_offsets(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Q4_K and Q5_K: numbers of six bits, of which those of the second half of groups lie apart."""
    first, second, low = blocks[..., 4:16].contiguous().view(torch.int32).unbind(-1)  # four octets each
    scales = torch.stack((first & 0x3F3F3F3F, (low & 0x0F0F0F0F) | (first >> 2) & 0x30303030), -1)
    offsets = torch.stack((second & 0x3F3F3F3F, (low >> 4) & 0x0F0F0F0F | (second >> 2) & 0x30303030), -1)
    factors = _halves(blocks[..., :4])
    return factors[..., :1] * scales.view(torch.uint8), factors[..., 1:] * offsets.view(torch.uint8)


def _q4_k(blocks: torch.Tensor) -> Blocks:
    return _fields(blocks[..., 16:], 32, 4), *_scales_and_offsets(blocks)


def _q5_k(blocks: torch.Tensor) -> Blocks:
    values = _fields(blocks[..., 48:], 32, 4) | _fields(blocks[..., 16:48], 32, 1) << 4
    return values, *_scales_and_offsets(blocks)


def _q6_k(blocks: torch.Tensor) -> Blocks:
    values = _fields(blocks[..., :128], 64, 4) | _fields(blocks[..., 128:192], 32, 2) << 4
    scales = blocks[..., 192:208].view(torch.int8).float()
    return (values - 32).view(torch.int8), _halves(blocks[..., 208:]) * scales, None


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _looked_up(table: tuple[int, ...], octets: torch.Tensor) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.int8, device=octets.device)[_fields(octets, 16, 4).int()]


def _iq4_nl(blocks: torch.Tensor) -> Blocks:
    return _looked_up(_IQ4, blocks[..., 2:]), _halves(blocks[..., :2]), None


def _iq4_xs(blocks: torch.Tensor) -> Blocks:
    scales = _fields(blocks[..., 4:8], 1, 4) | _fields(blocks[..., 2:4], 1, 2) << 4
    return _looked_up(_IQ4, blocks[..., 8:]), _halves(blocks[..., :2]) * (scales.float() - 32), None


def _mxfp4(blocks: torch.Tensor) -> Blocks:
    exponents = blocks[..., :1].int()  # values are twice those of e2m1, scales half
    scales = torch.where(exponents < 2, 0x200000 << exponents, (exponents - 1) << 23).view(torch.float32)
    return _looked_up(_FP4, blocks[..., 1:]), scales, None


_TYPES: dict[str, tuple[int, Callable[[torch.Tensor], Blocks]]] = {
    "Q4_0": (32, _q4_0),
    "Q4_1": (32, _q4_1),
    "Q5_0": (32, _q5_0),
    "Q5_1": (32, _q5_1),
    "Q8_0": (32, _q8_0),
    "Q2_K": (256, _q2_k),
    "Q3_K": (256, _q3_k),
    "Q4_K": (256, _q4_k),
    "Q5_K": (256, _q5_k),
    "Q6_K": (256, _q6_k),
    "IQ4_NL": (32, _iq4_nl),
    "IQ4_XS": (256, _iq4_xs),
    "MXFP4": (32, _mxfp4),
}
"""Inputs in a block, and what decodes blocks."""
