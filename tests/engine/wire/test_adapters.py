import os
import pathlib

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


def test_names_are_packed_whole_into_the_room_there_is() -> None:
    use = AdapterUse(("a", "b"), (), ("ä",))
    assert unpack(use.pack(100)) == use == unpack(use.pack(100) + b"\0" * 9)
    assert unpack(b"") == AdapterUse()
    many = AdapterUse(tuple(f"name{i}" for i in range(100)), ("w",), ("r",))
    packed = many.pack(99)
    assert len(packed) <= 99
    assert unpack(packed) == AdapterUse(many.running[:5], ("w",), ("r",))
    assert unpack(AdapterUse(("x" * 99,)).pack(99)) == AdapterUse()
