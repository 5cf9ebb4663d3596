"""Headers of GGUF files: as the `gguf` package reads them, in parts, truncated, hostile."""

import itertools
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from weft.engine.gguf.file import GgufError, read_model

VALUES = {
    "a.int": -3,
    "a.float": 0.5,
    "a.flag": True,
    "a.text": "ü",
    "a.ints": [1, 2, 3],
    "a.texts": ["x", "", "中"],
}


def write(path: Path, count: int = 3, alignment: int = 32, **split: int) -> Path:
    writer = gguf.GGUFWriter(path, "llama", **split)
    writer.add_custom_alignment(alignment)
    writer.add_int32("a.int", -3)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "ü")
    writer.add_array("a.ints", [1, 2, 3])
    writer.add_array("a.texts", ["x", "", "中"])
    for index in range(count):
        writer.add_tensor(f"t{index}", np.full((2, 32 + 32 * index), index, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_and_places_are_those_of_the_package(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    model = read_model(path)
    assert {key: value for key, value in model.metadata.items() if key.startswith("a.")} == VALUES
    for tensor in gguf.GGUFReader(path).tensors:
        found = model.tensors[tensor.name]
        assert (found.kind, found.shape) == ("F16", tuple(reversed(tensor.shape.tolist())))
        assert (found.offset, found.row_bytes) == (tensor.data_offset, 2 * found.shape[-1])


def test_another_alignment_is_taken_into_account(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", alignment=256)
    model, tensors = read_model(path), gguf.GGUFReader(path).tensors
    assert [model.tensors[tensor.name].offset for tensor in tensors] == [tensor.data_offset for tensor in tensors]
    assert all(tensor.data_offset % 256 == 0 for tensor in tensors)


def test_types_have_the_sizes_of_the_package() -> None:
    from weft.engine.gguf.file import _OTHER_TYPES, _TYPES

    for number, (name, size, num_bytes) in _TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (name, (size, num_bytes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])
    assert all(gguf.GGMLQuantizationType(number).name == name for number, name in _OTHER_TYPES.items())


def test_parts_make_one_model(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", 5, split_max_tensors=2)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    for part in parts:
        model = read_model(part)
        assert [file.name for file in model.files] == [file.name for file in parts]
        assert sorted(model.tensors) == [f"t{index}" for index in range(5)]
    parts[1].unlink()
    with pytest.raises(GgufError, match=r"^1 of 3 parts are missing, the first is m-00002-of-00003\.gguf$"):
        read_model(parts[0])


def test_parts_of_unknown_alignment_are_refused(tmp_path: Path) -> None:
    """The `gguf` package aligns them as the first, which alone says how: their tensors were read from other places."""
    write(tmp_path / "m.gguf", 3, 4096, split_max_tensors=2)
    with pytest.raises(
        GgufError, match=r"^m-00002-of-00002\.gguf lacks general\.alignment, which is 4096 in m-00001-of-"
    ):
        read_model(tmp_path / "m-00001-of-00002.gguf")


def test_every_truncation_is_said(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (*range(1, 200), *range(200, len(whole) - 1, 37), len(whole) - 193):
        path.write_bytes(whole[:length])
        with pytest.raises(GgufError, match=r"^cut\.gguf is truncated: "):
            read_model(path)
    path.write_bytes(b"")
    with pytest.raises(GgufError, match=r"^cut\.gguf is empty$"):
        read_model(path)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HEAD, HUGE, MANY = b"GGUF" + struct.pack("<I", 3), 1 << 62, 1 << 22


def tensor(name: str = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"PK\3\4" + bytes(99), "is no GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(99), "has version 50331648 of GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(99), "has version 1 of GGUF (supported: 2 and 3, little endian)"),
        (HEAD + struct.pack("<QQ", 0, MANY), "is truncated"),
        (HEAD + struct.pack("<QQ", MANY, 0), "is truncated"),
        (HEAD + struct.pack("<QQ", 0, HUGE), f"has {HUGE:,} values in its header, at most 4,194,304 are supported"),
        (HEAD + struct.pack("<QQ", HUGE, 0), f"has {HUGE:,} values in its header"),
        (HEAD + struct.pack("<QQQ", 0, 1, HUGE), "is truncated"),
        (HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 4, MANY - 1), "is truncated"),
        (HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, MANY - 1), "is truncated"),
        (HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, MANY), "has 4,194,305 values"),
        (HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "has a list of type 9"),
        (HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<I", 77), "has a value of type 77"),
        (HEAD + struct.pack("<QQ", 0, 2) + (text("k") + struct.pack("<IB", 0, 1)) * 2, "has 'k' twice"),
        (HEAD + struct.pack("<QQQ", 0, 1, 1) + b"\xff", "has a text that is not UTF-8"),
        (HEAD + struct.pack("<QQ", 1, 0) + tensor(dims=(1,) * 9), "gives tensor 't' 9 dimensions"),
        (HEAD + struct.pack("<QQ", 1, 0) + tensor(dims=(33,), kind=2), "gives tensor 't' the shape [33]"),
        (HEAD + struct.pack("<QQ", 1, 0) + tensor(dims=(1 << 40, 1 << 40)), "is truncated: tensor t ends"),
        (HEAD + struct.pack("<QQ", 1, 0) + tensor(dims=(0, 8)), "gives tensor 't' the shape [8, 0]"),
        (
            HEAD + struct.pack("<QQ", 1, 0) + tensor(offset=8) + bytes(999),
            "places tensor 't' at 8, which is no multiple",
        ),
        (HEAD + struct.pack("<QQ", 1, 0) + tensor(offset=HUGE), "is truncated: tensor t ends"),
        (HEAD + struct.pack("<QQ", 1, 0) + tensor(kind=16), "has tensor 't' of type IQ2_XXS, which is not supported ("),
        (HEAD + struct.pack("<QQ", 1, 0) + tensor(kind=999), "has tensor 't' of type number 999, which is"),
        (HEAD + struct.pack("<QQ", 2, 0) + tensor() * 2 + bytes(999), "has tensor 't' twice"),
    ],
)
def test_what_a_hostile_file_says_is_bounded(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError) as caught:
        read_model(path)
    assert str(caught.value).startswith(f"bad.gguf {fault}") and "\n" not in str(caught.value)


def test_a_header_without_end_is_not_read(tmp_path: Path) -> None:
    """A sparse file of a text of 1 GiB; and a list of 64 million octets was one of 512 MB."""
    path = tmp_path / "long.gguf"
    values = struct.pack("<IQ", 8, 1 << 30), struct.pack("<IIQ", 9, 0, 64_000_000)
    for value, fault in zip(values, ("a header of more than 67,108,864 bytes", "64,000,001 values"), strict=True):
        with path.open("wb") as file:
            file.write(HEAD + struct.pack("<QQ", 0, 1) + text("k") + value)
            file.truncate((1 << 30) + 100)
        with pytest.raises(GgufError, match=rf"^long\.gguf has {fault}"):
            read_model(path)


def test_bytes_of_any_kind_do_no_more_than_be_refused(tmp_path: Path) -> None:
    whole = bytearray(write(tmp_path / "a.gguf").read_bytes())
    path, generator = tmp_path / "bad.gguf", np.random.default_rng(0)
    for _ in itertools.repeat(None, 300):
        changed = bytearray(whole)
        for place in generator.integers(4, 420, 3):
            changed[place] = generator.integers(256)
        path.write_bytes(changed)
        try:
            read_model(path)
        except GgufError as error:
            assert "\n" not in str(error)
