"""`weft doctor` as a whole, and where it looks."""

import contextlib
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from weft.engine.wire.machine import KernelChoice, MachineFacts, Verdict
from weft.server.cli import doctor
from weft.server.settings import Settings
from weft.server.supervise.checkpoint import DEMO_MODEL

SETTLED = KernelChoice("layers", "192 x 512", ("native", "torch"), "native", (Verdict("native", error=0.01),))
FACTS = MachineFacts(None, (), 8 * 10**9, ("avx2",), "avx2", (SETTLED,))


def answering(text: str, code: int = 0) -> list[str]:
    """A command that replaces the one that asks torch."""
    return [
        sys.executable,
        "-c",
        f"import sys; print({text!r}, file=sys.std{'err' if code else 'out'}); sys.exit({code})",
    ]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_nothing_is_missing_to_serve_the_demo_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "python_command", lambda *_: answering(msgspec.json.encode(FACTS).decode()))
    assert doctor.run(Settings(port=0)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "nothing is missing"
    found = {line[8:24].strip(): line[:8].strip() for line in lines[:-2] if line[:8].strip()}
    assert set(found) == {
        *("Python", "torch", "transformers", "tokenizers", "other packages", "model", "port", "runtime folder"),
        *("/dev/shm", "open files", "native kernels", "layers", "compiler", "CUDA", "memory"),
    }
    assert "ok      layers          native (192 x 512)" in lines
    assert {found[name] for name in ("Python", "torch", "model", "port", "native kernels", "memory")} == {"ok"}


def test_what_is_missing_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], taken_port: int, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(doctor, "python_command", lambda *_: answering("ImportError: no libtorch.so", code=1))
    assert doctor.run(Settings(port=taken_port, model=str(tmp_path))) == 1
    out = capsys.readouterr().out
    assert re.search(rf"^missing port .* in use by .* \(process {os.getpid()}\); port \d+ is free$", out, re.MULTILINE)
    assert re.search(r"^missing model .* no config.json in ", out, re.MULTILINE)
    assert re.search(r"^missing engine +torch cannot be used: ImportError: no libtorch.so$", out, re.MULTILINE)
    assert out.endswith("\n3 missing\n")


def test_the_engine_tells_its_facts_and_the_command_ends_with_1(taken_port: int) -> None:
    command = [sys.executable, "-m", "weft.server", "doctor", "--port", str(taken_port), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(r"^(ok|note) +native kernels ", done.stdout, re.MULTILINE)
    assert re.search(r"^(ok|note) +CUDA ", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("\n1 missing\n")


def test_a_hub_that_does_not_answer_is_waited_for_briefly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(doctor, "_HUB_S", 0.1)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        finding = doctor._model(Settings(model="org/model"))
    assert (finding.status, finding.detail) == ("missing", "org/model: the hub cannot be reached (timed out)")


@pytest.mark.parametrize("piece", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 302 Found\r\nlocation: /x\r\nA: "])
def test_a_hub_that_never_comes_to_an_end_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, piece: bytes
) -> None:
    """It had its time anew with every piece of its answer."""
    from huggingface_hub import constants

    monkeypatch.setattr(doctor, "_HUB_S", 0.3)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    has_ended = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            connection, _ = hub.accept()
            with connection:
                connection.sendall(piece)
                while not has_ended.wait(0.05):
                    connection.sendall(piece if b"100" in piece else b"x")

    with socket.create_server(("127.0.0.1", 0)) as hub:
        thread = threading.Thread(target=trickle)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        begin = time.monotonic()
        finding = doctor._model(Settings(model="org/model"))
        assert time.monotonic() - begin < 10
        has_ended.set()
        thread.join()
    assert (finding.status, finding.detail) == ("missing", "org/model: the hub cannot be reached (timed out)")


def test_the_files_of_gguf_models_are_weighed(tmp_path: pathlib.Path) -> None:
    """They counted as nothing, so that memory was enough for any of them."""
    files = [tmp_path / f"m-0000{index}-of-00002.gguf" for index in (1, 2)]
    for size, file in zip((30, 12), files, strict=True):
        file.write_bytes(bytes(size))
    assert [doctor._weights_bytes(Settings(model=str(path))) for path in (files[0], tmp_path)] == [42, 42]
    files[1].unlink()
    assert doctor._weights_bytes(Settings(model=str(files[0]))) == 0
    assert doctor._weights_bytes(Settings()) == (DEMO_MODEL / "model.safetensors").stat().st_size
