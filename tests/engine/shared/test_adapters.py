import os
import pathlib

import pytest

from weft.engine.shared.adapters import AdapterUse, find_adapter, unpack
from weft.engine.shared.errors import ModelError


def test_the_content_changes_with_the_files_and_the_folder(tmp_path: pathlib.Path) -> None:
    contents = set()
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).touch()
            os.utime(folder / name, (1, 1))
        first = find_adapter("n", folder)
        assert first == find_adapter("n", folder)
        contents.add(first.content)
        (folder / "adapter_model.safetensors").write_bytes(b"x")
        contents.add(find_adapter("n", folder).content)
        os.utime(folder / "adapter_config.json", (2, 2))
        contents.add(find_adapter("n", folder).content)
    assert len(contents) == 6


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
