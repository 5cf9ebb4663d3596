"""The process that reads pictures: what it answers, how it is bounded, and that its death is one picture's fault."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.picture_checkpoints import WRITERS, encoded, picture, processor_of, write_idefics3
from weft.engine.fallback.vision import load_encoder
from weft.engine.vision.eyes import tensors
from weft.engine.vision.shared import values_of
from weft.engine.wire.pictures import Picture
from weft.server.errors import ApiError
from weft.server.pictures import child, held, process
from weft.server.pictures.held import ReadPicture
from weft.server.pictures.process import PictureProcess

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
    reader.held.forget()
    assert read(reader, encoded(LARGE)).picture is not None
    first = reader._process
    assert first is not None
    pid = first._process.pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    assert read(reader, encoded(OTHER)).made.fault == "its reader died of it"
    assert read(reader, encoded(OTHER)).picture is None  # it is not tried again for a while
    reader.held.forget()
    assert read(reader, encoded(OTHER)).picture is not None
    assert reader._process is not first


def test_a_process_that_died_between_two_pictures_is_replaced(reader: PictureProcess) -> None:
    reader.held.forget()
    read(reader, encoded(LARGE))
    assert reader._process is not None
    os.kill(reader._process._process.pid, signal.SIGKILL)
    reader._process._process.wait()
    assert read(reader, encoded(picture(6, 80, 50))).picture is not None


def test_it_opens_no_file_and_has_one_thread_for_sums(reader: PictureProcess) -> None:
    reader.held.forget()
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


def test_a_file_that_comes_again_is_not_read_again(reader: PictureProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one API key. The least recently used one goes first."""
    reader.held.forget()
    first = asyncio.run(reader.read(encoded(LARGE), TOKEN, "a"))
    assert asyncio.run(reader.read(encoded(LARGE), TOKEN, "a")) is first
    second = asyncio.run(reader.read(encoded(LARGE), TOKEN, "b"))
    assert second is not first and second.made.digest == first.made.digest
    monkeypatch.setattr(held, "MAX_KEPT_BYTES", 2 * first.made.num_bytes)
    assert asyncio.run(reader.read(encoded(LARGE), TOKEN, "a")) is first
    asyncio.run(reader.read(encoded(OTHER), TOKEN, "a"))
    assert asyncio.run(reader.read(encoded(LARGE), TOKEN, "a")) is first
    assert asyncio.run(reader.read(encoded(LARGE), TOKEN, "b")) is not second


def test_pixels_have_the_type_that_the_engine_computes_in(folder: Path) -> None:
    reader = PictureProcess(folder)
    found = asyncio.run(reader.read(encoded(LARGE), TOKEN, dtype="bfloat16"))
    reader.close()
    assert found.picture is not None and found.picture.shared is not None
    wanted = processor_of(folder)(text="<image>", images=[LARGE], return_tensors="pt")["pixel_values"]
    data, pixels = bytes(values_of(found.picture)), found.picture.arrays["pixel_values"]
    assert (pixels.dtype, pixels.num_bytes) == ("bfloat16", wanted.numel() * 2)
    whole = Picture(TOKEN, found.picture.arrays, data)
    assert torch.equal(tensors(whole, torch.device("cpu"))["pixel_values"], wanted.bfloat16())
    assert found.picture.arrays["pixel_attention_mask"].dtype == "bool"


@pytest.mark.parametrize("family", WRITERS)
def test_an_engine_of_16_bits_sees_the_same(tmp_path: Path, family: str) -> None:
    """As if the model rounded the pixels, which it does before anything else."""
    WRITERS[family](tmp_path)
    encode = load_encoder(tmp_path, torch.device("cpu"), torch.bfloat16)
    made = processor_of(tmp_path)(text="<image>", images=[LARGE], return_tensors="np")
    of_picture = {name: value for name, value in made.items() if name not in child._OF_TEXT}
    features = []
    for dtype in ("float32", "bfloat16"):
        values = {
            name: (kind, torch.from_numpy(array)) for name, (kind, array) in child._values(of_picture, dtype).items()
        }
        assert values["pixel_values"][0] == dtype
        with torch.inference_mode():
            features.append(encode({name: array.view(getattr(torch, kind)) for name, (kind, array) in values.items()}))
    assert torch.equal(*features)


def test_a_processor_that_cannot_be_loaded_is_not_loaded_for_each_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "FAULT_S", 1000.0)
    made, starts, load_fault = PictureProcess(tmp_path), list[process.ReaderProcess](), process.ReaderProcess.load_fault

    def counted(self: process.ReaderProcess) -> str | None:
        starts.append(self)
        return load_fault(self)

    monkeypatch.setattr(process.ReaderProcess, "load_fault", counted)
    for _ in range(2):
        with pytest.raises(ApiError, match="the model's processor cannot be loaded") as caught:
            read(made, encoded(LARGE))
        assert caught.value.status == 500 and len(starts) == 1
    monkeypatch.setattr(sys, "executable", "/bin/false")  # which also cannot load it, and says so sooner
    made.close()  # the model is loaded anew
    monkeypatch.setattr(process, "FAULT_S", -1.0)
    for number in (2, 3):
        with pytest.raises(ApiError, match="the model's processor cannot be loaded"):
            read(made, encoded(LARGE))
        assert len(starts) == number


def test_what_it_says_before_it_dies_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "python"
    script.touch(0o700)
    for text, shown in (("head -c 1000000 /dev/zero", 4000), ("echo oh dear", 8)):
        script.write_text(f"#!/bin/sh\n{text} >&2\nexit 3\n")
        monkeypatch.setattr(sys, "executable", str(script))
        with caplog.at_level(logging.WARNING), pytest.raises(ApiError, match="its process died"):
            read(PictureProcess(tmp_path), encoded(LARGE))
        said = repr("oh dear\n" if shown == 8 else "\0" * 4000)
        assert caplog.messages == [f"the process that reads pictures ended (3); it said: {said}"]
        caplog.clear()


def test_without_pillow_the_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ApiError, match=r"pip install 'weft\[images\]'"):
        read(PictureProcess(folder), encoded(LARGE))
