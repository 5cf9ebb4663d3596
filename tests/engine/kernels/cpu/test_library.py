import shutil
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path

import pytest

from tests.engine.native_variants import BUILT
from weft.engine.kernels.cpu import library as kernels
from weft.engine.kernels.cpu import variants
from weft.engine.kernels.cpu.library import NativeLibrary, compiled_variants, load
from weft.engine.kernels.cpu.variants import VARIANTS


@pytest.fixture(autouse=True)
def no_memory_of_others() -> Iterator[None]:
    load.cache_clear()
    yield
    load.cache_clear()


def run_here(monkeypatch: pytest.MonkeyPatch, needs_of: str, vendor: str = "") -> None:
    """Let this CPU be one that has what a variant needs, and no more."""
    values = {"flags": " ".join(VARIANTS[needs_of].needs), "vendor_id": vendor}
    monkeypatch.setattr(variants, "cpu_value", values.__getitem__)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """Let these have been compiled, from the present source."""
    for name in names:
        (folder / f"{name}.so").touch()
    monkeypatch.setattr(kernels, "_path", lambda name: folder / f"{name}.so")
    monkeypatch.setattr(kernels, "_is_outdated", lambda path: False)
    monkeypatch.setattr(kernels, "NativeLibrary", lambda name, path: name)


@pytest.mark.parametrize(("vendor", "best"), [("GenuineIntel", "avx512_vnni"), ("AuthenticAMD", "avx512_bf16")])
def test_the_best_of_all_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, best: str) -> None:
    """Pairs of bfloat16 are taken where they are fast. A wheel has every variant."""
    run_here(monkeypatch, "avx512_bf16", vendor)
    install(monkeypatch, tmp_path, *VARIANTS)
    assert load() == best  # type: ignore[comparison-overlap]
    assert compiled_variants() == tuple(VARIANTS)


@pytest.mark.parametrize("only", ["amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"])
def test_one_alone_is_loaded_where_it_runs_and_is_fast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, only: str
) -> None:
    """A checkout has one. On another machine of the same folder, it may be one too many."""
    install(monkeypatch, tmp_path, only)
    assert compiled_variants() == (only,)
    run_here(monkeypatch, only, "AuthenticAMD")
    assert load() == (None if only == "portable" else only)
    assert load(only) == only  # type: ignore[comparison-overlap]
    load.cache_clear()
    run_here(monkeypatch, "portable")
    assert load() is None


def test_objects_of_another_source_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: NativeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    """Callers may pass by now what the old functions do not expect."""
    monkeypatch.setattr(kernels, "_path", lambda variant: BUILT / f"{variant}.so")
    assert load(library.variant) is not None
    load.cache_clear()
    changed = tmp_path / "source"
    shutil.copytree(variants.SOURCES, changed)
    monkeypatch.setattr(variants, "SOURCES", changed)
    assert load(library.variant) is not None, "other times are no other source"
    load.cache_clear()
    with (changed / "include" / "tiles.h").open("a") as header:
        header.write("/* another */\n")
    assert load(library.variant) is None
    assert "source has changed since; install Weft again" in caplog.text


def test_objects_that_know_no_source_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Weft compiled such, once."""
    monkeypatch.setattr(kernels, "_path", lambda variant: Path(find_library("m") or "libm.so.6"))
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert load("avx2") is None
    assert "source has changed" in caplog.text


def test_without_a_compiled_object_there_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "_path", lambda variant: tmp_path / variant)
    assert (load(), compiled_variants()) == (None, ())


def test_an_object_that_does_not_load_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.so").write_bytes(b"no library")
    monkeypatch.setattr(kernels, "_path", lambda variant: tmp_path / "broken.so")
    assert load("avx2") is None
    assert "left out" in caplog.text
