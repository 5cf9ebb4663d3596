"""Reads the header of a GGUF file: its metadata, and where its tensors lie (github.com/ggml-org/ggml, docs/gguf.md).

The reader of the `gguf` package makes an array of every token, which takes seconds, and believes every count. Here a
count is believed only as far as the file goes, and a header has at most 64 MiB and 4,194,304 values.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import NoReturn, TypeVar

_T = TypeVar("_T")
Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

_MAX_HEADER_BYTES = 64 << 20
_MAX_VALUES = 1 << 22  # each takes up to a hundred bytes here; the largest vocabularies have two million
_MAX_DIMENSIONS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)

_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    39: ("MXFP4", 32, 17),
}
"""By number: name, values in a block, its bytes."""
_OTHER_TYPES = {
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


class GgufError(Exception):
    """The file cannot be served; one line that names the fault."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
        kind: Its type, such as Q4_K.
        shape: Outputs before inputs.
        row_bytes: Bytes of the values of the last dimension.
        offset: In the file.
    """

    file: Path
    kind: str
    shape: tuple[int, ...]
    row_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model of one or more files; the first has the metadata."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    def optional(self, key: str, kind: type[_T]) -> _T | None:
        """A value of this type, None if it is not there; `[ARCH]` in the key stands for the architecture's name."""
        key = key.replace("[ARCH]", str(self.metadata.get("general.architecture")))
        value = self.metadata.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        is_finite = not isinstance(value, float) or isfinite(value)
        if value is None or (type(value) is kind and is_finite):
            return value
        raise GgufError(f"{key} must be of type {kind.__name__}, got {str(value)[:60]!r}")

    def value(self, key: str, kind: type[_T]) -> _T:
        """A value that must be there."""
        value = self.optional(key, kind)
        if value is None:
            architecture = str(self.metadata.get("general.architecture"))
            raise GgufError(f"the file lacks {key.replace('[ARCH]', architecture)}")
        return value

    def values(self, key: str, kind: type[_T]) -> list[_T]:
        """A list of values of this type; empty if it is not there."""
        items = self.optional(key, list) or []
        if not all(type(item) is kind for item in items):
            raise GgufError(f"{key} must be a list of type {kind.__name__}")
        return items


def read_model(path: Path) -> GgufModel:
    """Read the headers of a file and of the other parts of its model.

    Raises:
        GgufError: A part is missing, truncated or malformed, or has tensors of a type that is not supported.
    """
    files = parts(path)
    metadata, tensors = _read(files[0])
    for file in files[1:]:
        own, of_part = _read(file)
        if "general.alignment" not in own and (alignment := metadata.get("general.alignment", 32)) != 32:
            raise GgufError(
                f"{file.name} lacks general.alignment, which is {alignment} in {files[0].name}: where its tensors lie "
                "cannot be told. Take the model in one file, or its safetensors"
            )
        for name, tensor in of_part.items():
            if name in tensors:
                raise GgufError(f"{file.name}: tensor {name} is in another part, too")
            tensors[name] = tensor
    model = GgufModel(files, metadata, tensors)
    num_tensors = model.optional("split.tensors.count", int)
    if num_tensors not in (None, len(tensors)):
        raise GgufError(f"{len(tensors)} tensors in {len(files)} files, and split.tensors.count is {num_tensors}")
    return model


def part_names(name: str) -> list[str]:
    """What all files of a model are called of which this is one, in order."""
    split = _SPLIT.search(name)
    if split is None:
        return [name]
    count = int(split[2])
    return [f"{name[: split.start()]}-{index + 1:05}-of-{count:05}.gguf" for index in range(count)]


def parts(path: Path) -> tuple[Path, ...]:
    """All files of a model of which this is one, in order; raises GgufError if some are missing."""
    files = tuple(path.with_name(name) for name in part_names(path.name))
    if files == (path,):
        return files
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise GgufError(f"{len(missing)} of {len(files)} parts are missing, the first is {', '.join(missing[:1])}")
    return files


def _read(path: Path) -> tuple[dict[str, Value], dict[str, GgufTensor]]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data).read()
    except OSError as error:
        raise GgufError(f"{path.name} is not readable ({error.strerror})") from None
    except ValueError:  # an empty file cannot be mapped
        raise GgufError(f"{path.name} is empty") from None


class _Header:
    """Reads one header, from the beginning of a file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at, self._num_values = path, data, 0, 0

    def read(self) -> tuple[dict[str, Value], dict[str, GgufTensor]]:
        if self._take(4) != b"GGUF":
            self._refuse("is no GGUF file")
        version = self._number("I")
        if version not in (2, 3):
            self._refuse(f"has version {version} of GGUF (supported: 2 and 3, little endian)")
        num_tensors, num_values = self._count(), self._count()
        metadata: dict[str, Value] = {}
        for _ in range(num_values):
            key = self._text()
            if key in metadata:
                self._refuse(f"has {key!r} twice")
            metadata[key] = self._value(self._number("I"))
        tensors = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            self._refuse("has no number above 0 as general.alignment")
        start = -(-self._at // alignment) * alignment
        found = {}
        for name, kind, shape, row_bytes, offset in tensors:
            if name in found:
                self._refuse(f"has tensor {name!r} twice")
            if offset % alignment:
                fault = f"places tensor {name!r} at {offset:,}, which is no multiple of {alignment:,}, its alignment"
                self._refuse(fault)
            if start + offset + prod(shape[:-1]) * row_bytes > len(self._data):
                self._refuse(f"is truncated: tensor {name} ends behind its end ({len(self._data):,} bytes)")
            found[name] = GgufTensor(self._path, kind, shape, row_bytes, start + offset)
        return metadata, found

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        name, num_dimensions = self._text(), self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self._refuse(f"gives tensor {name!r} {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        if number not in _TYPES:
            kind = _OTHER_TYPES.get(number, f"number {number}")
            self._refuse(
                f"has tensor {name!r} of type {kind}, which is not supported (supported: "
                f"{', '.join(kind for kind, _, _ in _TYPES.values())}). Take another file of the model, such as Q4_K_M"
            )
        kind, size, num_bytes = _TYPES[number]
        if not all(shape) or shape[-1] % size:
            self._refuse(f"gives tensor {name!r} the shape {list(shape)}, which blocks of {size} values do not fill")
        return name, kind, shape, shape[-1] // size * num_bytes, offset

    def _value(self, kind: int) -> Value:
        if kind in _SCALARS:
            value: Value = self._number(_SCALARS[kind])
            return value
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            self._refuse(f"has a value of type {kind}, which GGUF does not have")
        of, count = self._number("I"), self._count()
        if of == _TEXT:
            return [self._text() for _ in range(count)]
        if of not in _SCALARS:
            self._refuse(f"has a list of type {of}, which is not supported")
        size = struct.calcsize(_SCALARS[of])
        octets = self._take(count * size)
        return list(struct.unpack(f"<{count}{_SCALARS[of]}", octets))

    def _count(self) -> int:
        count = self._number("Q")
        self._num_values += count
        if self._num_values > _MAX_VALUES:
            self._refuse(f"has {self._num_values:,} values in its header, at most {_MAX_VALUES:,} are supported")
        return count

    def _text(self) -> str:
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError:
            self._refuse("has a text that is not UTF-8")

    def _number(self, code: str) -> int:
        number: int = struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]
        return number

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            self._refuse(f"is truncated: its header ends behind its end ({len(self._data):,} bytes)")
        if end > _MAX_HEADER_BYTES:
            self._refuse(f"has a header of more than {_MAX_HEADER_BYTES:,} bytes")
        octets = self._data[self._at : end]
        self._at = end
        return octets

    def _refuse(self, fault: str) -> NoReturn:
        raise GgufError(f"{self._path.name} {fault}")
