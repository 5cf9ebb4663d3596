import ctypes
from pathlib import Path

import pytest

from engine.native import library
from engine.native.library import VARIANTS, NativeLibrary, load, runnable_variants


def test_variants_are_those_that_the_cpu_runs_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = {variant for variant in VARIANTS if library._path(variant)}
    monkeypatch.setattr(library, "_cpu_flags", lambda: VARIANTS["avx512_bf16"] | {"avx2", "sse2"})
    assert list(runnable_variants()) == [
        variant for variant in ("avx512_bf16", "avx512", "avx2", "portable") if variant in compiled
    ]
    monkeypatch.setattr(library, "_cpu_flags", frozenset[str])
    assert list(runnable_variants()) == [variant for variant in ("portable",) if variant in compiled]


def test_without_a_compiled_object_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    load.cache_clear()
    monkeypatch.setattr(library, "_path", lambda variant: None)
    assert load() is None
    load.cache_clear()


def test_an_object_that_does_not_load_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load.cache_clear()
    (tmp_path / "broken.so").write_bytes(b"no library")
    monkeypatch.setattr(library, "_path", lambda variant: tmp_path / "broken.so")
    assert load() is None
    assert "left out" in caplog.text
    load.cache_clear()


def test_kernels_share_the_threads_of_torch(library: NativeLibrary) -> None:
    maps = Path("/proc/self/maps").read_text()
    assert len({line.split()[-1] for line in maps.splitlines() if "libgomp" in line}) == 1
    assert isinstance(library.function("weft_rms_norm", ctypes.c_void_p), ctypes._CFuncPtr)
