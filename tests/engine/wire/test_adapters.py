import os
import pathlib
import time

import pytest

from weft.engine.wire.errors import ModelError
from weft.engine.wire.options import AdapterUse, find_adapter, unpack


def test_the_content_is_that_of_the_files_whatever_else_is_equal(tmp_path: pathlib.Path) -> None:
    """It was made of the path, sizes and times, so other weights could meet the blocks that earlier ones had made."""
    contents, folder = list[str](), tmp_path / "a"
    folder.mkdir()
    for config, weights in ((b"{}", b"x"), (b"{}", b"y"), (b"{ }", b"x"), (b"{}x", b""), (b"{}", b"x")):
        for name, data in (("adapter_config.json", config), ("adapter_model.safetensors", weights)):
            (folder / name).write_bytes(data)
            os.utime(folder / name, (1, 1))
        contents.append(find_adapter("n", folder).content)
    assert len(set(contents)) == 4 and contents[0] == contents[4]
    assert find_adapter("n", folder.rename(tmp_path / "b")).content == contents[4]


def test_what_is_missing_is_named(tmp_path: pathlib.Path) -> None:
    for missing, fault in (("adapter_config.json", "adapter_config.json"), ("x", "adapter_model.safetensors")):
        with pytest.raises(ModelError, match=f"^no {fault} in {tmp_path}$"):
            find_adapter("n", tmp_path)
        (tmp_path / missing).touch()
    with pytest.raises(ModelError, match=r"^no such folder: "):
        find_adapter("n", tmp_path / "no")
    (tmp_path / "adapter_config.json").unlink()
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(ModelError, match=r"/adapter_config\.json is no regular file$"):
        find_adapter("n", tmp_path)


def test_files_of_any_size_are_read_in_time(tmp_path: pathlib.Path) -> None:
    """A terabyte of nothing takes no room on the disk, and held a thread for a quarter of an hour."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with (tmp_path / "adapter_model.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    begin = time.monotonic()
    with pytest.raises(ModelError, match=r"its files cannot be read within 0\.1 s$"):
        find_adapter("n", tmp_path, 0.1)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("config", "size", "fault"),
    [
        (b" " * (1 << 20) + b"{}", 2, r"adapter_config\.json must have at most 1,048,576 bytes, got 1,048,578$"),
        (b"{}", 100_000_000, r"header of .*adapter_model\.safetensors must have at most 33,554,432 bytes"),
        (b"{}", 2**64 - 1, "got 18,446,744,073,709,551,615$"),
    ],
)
def test_what_is_long_under_the_interpreters_lock_is_refused(
    tmp_path: pathlib.Path, config: bytes, size: int, fault: str
) -> None:
    (tmp_path / "adapter_config.json").write_bytes(config)
    (tmp_path / "adapter_model.safetensors").write_bytes(size.to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match=fault):
        find_adapter("n", tmp_path)


@pytest.mark.parametrize("num_before", [0, 1, 5000, 200_000])
def test_modules_of_its_own_are_found_wherever_they_stand(tmp_path: pathlib.Path, num_before: int) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    plain = b'"base_model.model.layers.0.q_proj.lora_A.weight":{"dtype":"F32"},' * num_before
    for own, has_modules in ((b"", False), (b'"base_model.model.lm_head.weight":{"dtype":"F32"}', True)):
        header = b"{" + plain + own + b"}"
        (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        assert find_adapter("n", tmp_path).has_modules is has_modules


def test_names_are_packed_whole_into_the_room_there_is() -> None:
    use = AdapterUse(("a", "b"), (), ("ä",))
    assert unpack(use.pack(100)) == use == unpack(use.pack(100) + b"\0" * 9)
    assert unpack(b"") == AdapterUse()
    many = AdapterUse(tuple(f"name{i}" for i in range(100)), ("w",), ("r",))
    packed = many.pack(99)
    assert len(packed) <= 99
    assert unpack(packed) == AdapterUse(many.running[:5], ("w",), ("r",))
    assert unpack(AdapterUse(("x" * 99,)).pack(99)) == AdapterUse()
