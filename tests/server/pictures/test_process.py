"""The process that reads pictures: what it answers, how it is bounded, and that its death is one picture's fault."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.picture_checkpoints import WRITERS, encoded, picture, processor_of, write_idefics3
from weft.server.errors import ApiError
from weft.server.pictures import process as reading
from weft.server.pictures.process import PictureProcess, ReadPicture

TOKEN = 702
LARGE, OTHER = picture(1, 80, 50), picture(5, 80, 50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_idefics3(made := tmp_path_factory.mktemp("idefics3"))
    return made


@pytest.fixture(scope="module")
def reader(folder: Path) -> Iterator[PictureProcess]:
    made = PictureProcess(folder)
    yield made
    made.close()


def read(reader: PictureProcess, data: bytes) -> ReadPicture:
    return asyncio.run(reader.read(data, TOKEN))


@pytest.mark.parametrize("family", WRITERS)
def test_it_makes_what_transformers_makes(tmp_path: Path, family: str) -> None:
    WRITERS[family](tmp_path)
    reader = PictureProcess(tmp_path)
    found = read(reader, encoded(LARGE))
    reader.close()
    made, sign = found.made, found.sign
    processor = processor_of(tmp_path)
    wanted = processor(text="<image>", images=[LARGE], return_tensors="np")
    assert found.picture is not None and found.picture.shared is not None and sign == "<image>" == made.placeholder
    number, num_bytes = found.picture.shared.number, found.picture.shared.num_bytes
    data = os.pread(number, num_bytes + 1, 0)
    with pytest.raises(PermissionError):  # it is sealed
        os.ftruncate(number, num_bytes - 1)
    assert processor.tokenizer(made.text)["input_ids"] == wanted["input_ids"][0].tolist()
    assert made.num_tokens == wanted["input_ids"][0].tolist().count(TOKEN) > 8
    assert found.picture.arrays.keys() == wanted.keys() - {"input_ids", "attention_mask"}
    for name in found.picture.arrays:
        array = found.picture.arrays[name]
        kind = "bool" if name.endswith("_mask") else str(wanted[name].dtype)  # a mask of int64 is twice the pixels
        assert (array.dtype, array.shape) == (kind, wanted[name].shape)
        assert data[array.start : array.start + array.num_bytes] == wanted[name].astype(kind).tobytes()
    assert len(data) == sum(array.num_bytes for array in found.picture.arrays.values())


def test_smolvlm_shows_pictures_as_its_own_processor_does(tmp_path: Path) -> None:
    """Which cannot be loaded without packages for videos, so that of Idefics 3 is."""
    WRITERS["smolvlm"](tmp_path)
    processor = processor_of(tmp_path)
    for size in ((80, 50), (20, 20), (32, 32), (31, 64)):
        made = processor.image_processor([[picture(1, *size)]], return_row_col_info=True)
        told = [made[name][0][0] for name in ("rows", "cols")]
        marks = processor.fake_image_token, processor.image_token, processor.global_image_tag
        assert processor.replace_image_token(made, 0) == get_image_prompt_string(*told, 4, *marks)


def test_equal_pixels_are_equal_pictures(reader: PictureProcess) -> None:
    first = read(reader, encoded(LARGE)).made.digest
    assert read(reader, encoded(LARGE, "WEBP", lossless=True)).made.digest == first
    assert read(reader, encoded(LARGE.transpose(Image.Transpose.ROTATE_180))).made.digest != first


def test_a_death_is_one_pictures_fault(reader: PictureProcess) -> None:
    reader._kept.clear()
    assert read(reader, encoded(LARGE)).picture is not None
    first = reader._process
    assert first is not None
    pid = first._process.pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    assert read(reader, encoded(OTHER)).made.fault == "its reader died of it"
    assert read(reader, encoded(OTHER)).picture is not None
    assert reader._process is not first


def test_a_process_that_died_between_two_pictures_is_replaced(reader: PictureProcess) -> None:
    reader._kept.clear()
    read(reader, encoded(LARGE))
    assert reader._process is not None
    os.kill(reader._process._process.pid, signal.SIGKILL)
    reader._process._process.wait()
    assert read(reader, encoded(picture(6, 80, 50))).picture is not None


def test_it_opens_no_file_and_has_one_thread_for_sums(reader: PictureProcess) -> None:
    reader._kept.clear()
    read(reader, encoded(LARGE))
    assert reader._process is not None
    limits = Path(f"/proc/{reader._process._process.pid}/limits").read_text().splitlines()
    (files,) = [line.split() for line in limits if line.startswith("Max open files")]
    assert files[3:5] == ["0", "0"]
    environment = Path(f"/proc/{reader._process._process.pid}/environ").read_bytes()
    assert b"OMP_NUM_THREADS=1" in environment and b"API_KEY" not in environment


def test_it_ends_with_its_owner(folder: Path) -> None:
    code = (
        "import asyncio, os, sys; from pathlib import Path; from weft.server.pictures.process import PictureProcess\n"
        f"p = PictureProcess(Path({str(folder)!r})); asyncio.run(p.read(b'x', {TOKEN}))\n"
        "print(p._process._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid, deadline = int(done.stdout), time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


def test_what_is_held_is_bounded(reader: PictureProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    reader._kept.clear()
    first = read(reader, encoded(LARGE))
    assert first.picture is not None and first.picture.shared is not None
    num_bytes, shared = first.picture.num_bytes, first.picture.shared
    assert reader._held == {shared}
    monkeypatch.setattr(reading, "MAX_HELD_BYTES", 2 * num_bytes - 1)
    with pytest.raises(ApiError, match="may be held at once; try again in a moment") as caught:
        read(reader, encoded(OTHER))
    assert caught.value.status == 503
    del first
    assert not reader._held
    with pytest.raises(OSError):
        os.fstat(shared.number)
    assert read(reader, encoded(LARGE)).picture is not None
    assert read(reader, encoded(OTHER)).picture is not None  # what is only kept makes room


def test_a_file_that_comes_again_is_not_read_again(reader: PictureProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one API key. The least recently used one goes first."""
    reader._kept.clear()
    first = asyncio.run(reader.read(encoded(LARGE), TOKEN, "a"))
    assert asyncio.run(reader.read(encoded(LARGE), TOKEN, "a")) is first
    second = asyncio.run(reader.read(encoded(LARGE), TOKEN, "b"))
    assert second is not first and second.made.digest == first.made.digest
    monkeypatch.setattr(reading, "MAX_KEPT_BYTES", 2 * first.made.num_bytes)
    assert asyncio.run(reader.read(encoded(LARGE), TOKEN, "a")) is first
    asyncio.run(reader.read(encoded(OTHER), TOKEN, "a"))
    assert asyncio.run(reader.read(encoded(LARGE), TOKEN, "a")) is first
    assert asyncio.run(reader.read(encoded(LARGE), TOKEN, "b")) is not second


def test_a_checkpoint_without_a_processor_says_so(tmp_path: Path) -> None:
    made: Any = PictureProcess(tmp_path)
    with pytest.raises(ApiError, match="the model's processor cannot be loaded"):
        read(made, encoded(LARGE))


def test_without_pillow_the_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ApiError, match=r"pip install 'weft\[images\]'"):
        read(PictureProcess(folder), encoded(LARGE))
