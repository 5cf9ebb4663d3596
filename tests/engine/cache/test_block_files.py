import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weft.engine.cache import block_files
from weft.engine.cache.block_files import BlockFiles, Key

ROW_BYTES = 5000
FILE_BYTES = 8192  # with its header, in whole pages


def key(number: int, group: int = 0) -> Key:
    return group, number.to_bytes(16, "big")


def row(number: int) -> torch.Tensor:
    return torch.randint(0, 256, (ROW_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def put(files: BlockFiles, number: int) -> None:
    files.add(key(number), files.write(key(number), row(number)))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BlockFiles]:
    opened = BlockFiles(tmp_path / "kv", 3 * FILE_BYTES)
    yield opened
    opened.close()


def test_blocks_outlive_the_process_that_wrote_them(files: BlockFiles, tmp_path: Path) -> None:
    put(files, 1)
    assert files.hash_key() == files.hash_key()
    assert stat.S_IMODE((tmp_path / "kv" / "key").stat().st_mode) == 0o600
    secret = files.hash_key()
    files.close()
    again = BlockFiles(tmp_path / "kv", 3 * FILE_BYTES)
    assert not again.has(key(1))
    again.list_files()
    assert again.has(key(1)) and again.num_blocks == 1 and again.hash_key() == secret
    assert torch.equal(again.read(key(1), ROW_BYTES), row(1))
    again.close()


def test_the_least_recently_used_make_room(files: BlockFiles, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        put(files, number)
        os.utime(tmp_path / "kv" / f"0-{key(number)[1].hex()}.kv", (time.time() - 100 + number,) * 2)
    files.read(key(1), ROW_BYTES)
    put(files, 4)
    assert [number for number in (1, 2, 3, 4) if files.has(key(number))] == [1, 3, 4]
    assert sum(path.suffix == ".kv" for path in (tmp_path / "kv").iterdir()) == 3
    files.close()
    smaller = BlockFiles(tmp_path / "kv", FILE_BYTES * 2)
    smaller.list_files()
    assert [number for number in (1, 3, 4) if smaller.has(key(number))] == [1, 4]  # the order outlives it, too
    smaller.close()


def test_the_number_of_files_is_bounded(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_files, "MAX_NUM_FILES", 2)
    for number in (1, 2, 3):
        put(files, number)
    assert [number for number in (1, 2, 3) if files.has(key(number))] == [2, 3]


def test_what_is_larger_than_the_folder_may_be_is_not_written(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, FILE_BYTES - 1)
    assert files.write(key(1), row(1)) == 0
    assert not list(tmp_path.glob("*.kv"))
    files.close()


@pytest.mark.parametrize("damage", ["bit", "cut", "header", "longer row"])
def test_damaged_files_are_not_read(files: BlockFiles, tmp_path: Path, damage: str) -> None:
    put(files, 1)
    (path,) = (tmp_path / "kv").glob("*.kv")
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[-1] ^= 1
    if damage == "header":
        content[0] ^= 1
    path.write_bytes(content[:-1] if damage == "cut" else content)
    with pytest.raises(ValueError, match="is damaged"):
        files.read(key(1), ROW_BYTES + (damage == "longer row"))


@pytest.mark.parametrize("other", [(0, key(2)[1]), (1, key(1)[1])])
def test_a_file_under_the_name_of_another_block_is_not_read(
    files: BlockFiles, tmp_path: Path, other: tuple[int, bytes]
) -> None:
    """Its keys and values would have been those of another text, or of another cache."""
    put(files, 1)
    (path,) = (tmp_path / "kv").glob("*.kv")
    files.write(other, row(2))
    (target,) = set((tmp_path / "kv").glob("*.kv")) - {path}
    target.write_bytes(path.read_bytes())
    assert files.read(key(1), ROW_BYTES).equal(row(1))
    with pytest.raises(ValueError, match="is damaged"):
        files.read(other, ROW_BYTES)


def test_what_was_left_unfinished_is_removed(files: BlockFiles, tmp_path: Path) -> None:
    left = tmp_path / "kv" / "0-00.new"
    left.write_bytes(b"half")
    (tmp_path / "kv" / "readme.kv").write_bytes(b"not a block")
    files.list_files()
    assert not left.exists() and files.num_blocks == 0


def test_a_full_disk_leaves_nothing_behind(files: BlockFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(block_files.os, "write", refuse)
        with pytest.raises(OSError, match="No space left"):
            files.write(key(1), row(1))
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["lock"]
    put(files, 1)
    assert files.has(key(1))


def test_one_process_uses_a_folder(files: BlockFiles, tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError):
        BlockFiles(tmp_path / "kv", FILE_BYTES)


def test_several_processes_share_a_folder(tmp_path: Path) -> None:
    first, second = (BlockFiles(tmp_path, 10 * FILE_BYTES, is_shared=True) for _ in range(2))
    assert first.hash_key() == second.hash_key()
    put(first, 1)
    assert not second.has(key(1)) and second.look(key(1)) and second.has(key(1))
    assert torch.equal(second.read(key(1), ROW_BYTES), row(1))
    first.drop(key(1))
    assert not first.look(key(1)), "it was not computed, and is about to be removed"
    first.remove(key(1))
    assert second.has(key(1)) and not second.look(key(1)) and not second.has(key(1))
    unfinished, abandoned = tmp_path / "0-00.a.new", tmp_path / "0-00.b.new"
    unfinished.write_bytes(b"half")
    abandoned.write_bytes(b"half")
    os.utime(abandoned, (time.time() - 86400,) * 2)
    first.list_files()
    assert unfinished.exists() and not abandoned.exists()
    with pytest.raises(BlockingIOError):
        BlockFiles(tmp_path, FILE_BYTES)
    first.close()
    second.close()


def test_writers_of_a_shared_folder_keep_it_small(tmp_path: Path) -> None:
    writers = [BlockFiles(tmp_path, 8 * FILE_BYTES, is_shared=True) for _ in range(2)]
    for number in range(20):
        put(writers[number % 2], number)
        os.utime(tmp_path / f"0-{key(number)[1].hex()}.kv", (time.time() - 100 + number,) * 2)
    left = [number for number in range(20) if writers[0].look(key(number))]
    assert left == list(range(20 - len(left), 20)) and 6 <= len(left) <= 8
    for files in writers:
        files.close()
