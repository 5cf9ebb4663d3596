import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from weft.engine.kernels.cpu import library as kernels
from weft.engine.kernels.cpu.library import VARIANTS, NativeLibrary, load, runnable_variants


def test_variants_are_those_that_the_cpu_runs_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = {variant for variant in VARIANTS if kernels._path(variant)}
    monkeypatch.setattr(kernels, "_cpu_words", lambda key: VARIANTS["avx512_bf16"] | {"avx2", "f16c", "sse2"})
    assert list(runnable_variants()) == [
        variant for variant in ("avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable") if variant in compiled
    ]
    monkeypatch.setattr(kernels, "_cpu_words", lambda key: frozenset())
    assert list(runnable_variants()) == [variant for variant in ("portable",) if variant in compiled]


def test_all_are_compiled_where_the_compiler_knows_them() -> None:
    """A kernel that does not compile is left out without an error."""
    if platform.machine() != "x86_64" or not shutil.which("gcc"):
        pytest.skip("no compiler for all of them")
    if int(subprocess.check_output(["gcc", "-dumpversion"]).split(b".")[0]) < 11:
        pytest.skip("this compiler does not know AMX")
    assert [variant for variant in VARIANTS if kernels._path(variant) is None] == []


def test_the_portable_kernels_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    load.cache_clear()
    monkeypatch.setattr(kernels, "_cpu_words", lambda key: frozenset())
    assert load() is None
    load.cache_clear()


@pytest.mark.parametrize(("vendor", "best"), [("GenuineIntel", "avx512_vnni"), ("AuthenticAMD", "avx512_bf16")])
def test_pairs_of_bfloat16_are_taken_where_they_are_fast(
    monkeypatch: pytest.MonkeyPatch, vendor: str, best: str
) -> None:
    words = {"flags": VARIANTS["avx512_bf16"], "vendor_id": frozenset({vendor})}
    monkeypatch.setattr(kernels, "_cpu_words", words.__getitem__)
    monkeypatch.setattr(kernels, "_path", Path)
    monkeypatch.setattr(kernels, "_is_outdated", lambda path: False)
    monkeypatch.setattr(kernels, "NativeLibrary", lambda name, path: name)
    load.cache_clear()
    assert load() == best  # type: ignore[comparison-overlap]
    load.cache_clear()


def test_objects_older_than_their_source_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: NativeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    """Callers may pass by now what the old functions do not expect."""
    compiled = kernels._path(library.variant)
    assert compiled is not None
    copy = tmp_path / compiled.name
    shutil.copy2(compiled, copy)
    source = tmp_path / "linear.c"
    source.touch()
    os.utime(source, (copy.stat().st_mtime + 3600,) * 2)
    monkeypatch.setattr(kernels, "_path", lambda variant: copy)
    load.cache_clear()
    assert load(library.variant) is None
    assert "source has changed" in caplog.text
    load.cache_clear()


def test_without_a_compiled_object_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    load.cache_clear()
    monkeypatch.setattr(kernels, "_path", lambda variant: None)
    assert load() is None
    load.cache_clear()


def test_an_object_that_does_not_load_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load.cache_clear()
    (tmp_path / "broken.so").write_bytes(b"no library")
    monkeypatch.setattr(kernels, "_path", lambda variant: tmp_path / "broken.so")
    assert load() is None
    assert "left out" in caplog.text
    load.cache_clear()
