"""Which variants a machine runs, and how they are compiled: with small sources in place of the kernels."""

import ctypes
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.engine.native_variants import BUILT, CACHE
from weft.engine.kernels.cpu import variants
from weft.engine.kernels.cpu.variants import VARIANTS, build, install

needs_gcc = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("gcc"), reason="no compiler that knows every variant"
)
SOURCES = {
    "initialise.c": "int weft_initialise(void) { return 0; }\nconst char *weft_source(void) { return WEFT_SOURCE; }\n",
    "one.c": '#include "both.h"\nint one(void) { return BOTH + 1; }\n',
    "two.c": '#include "outer.h"\nint two(void) { return BOTH + 2; }\n',
    "alone.c": "#include <stdint.h>\nint32_t alone(void) { return 9; }\n",
    "include/outer.h": '#pragma once\n#include "both.h"\n',
    "include/both.h": "#pragma once\nenum { BOTH = 40 };\n",
}


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of sources, and an empty cache."""
    folder = tmp_path / "source"
    (folder / "include").mkdir(parents=True)
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(variants, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def count_of(said: str) -> int:
    """How many files were compiled, from what was said."""
    return int(said.split("): ")[-1].split(" files")[0]) if "Compiled" in said else 0


@pytest.mark.parametrize(
    ("has", "vendor", "runnable", "preferred"),
    [
        ("amx", "GenuineIntel", list(VARIANTS), ["amx", "avx512_vnni", "avx512"]),
        ("avx512_bf16", "AuthenticAMD", list(VARIANTS)[1:], ["avx512_bf16", "avx512_vnni", "avx512"]),
        ("avx512", "AuthenticAMD", ["avx512", "portable"], ["avx512"]),
        ("avx2", "", ["avx2", "portable"], ["avx2"]),
        ("portable", "", ["portable"], []),
    ],
)
def test_variants_are_those_that_the_cpu_runs_best_first(
    monkeypatch: pytest.MonkeyPatch, has: str, vendor: str, runnable: list[str], preferred: list[str]
) -> None:
    values = {"flags": " ".join(VARIANTS[has].needs), "vendor_id": vendor}
    monkeypatch.setattr(variants, "cpu_value", values.__getitem__)
    without = [] if has in ("avx2", "portable") else ["avx2"]  # its names are not among those of AVX-512
    assert variants.runnable() == [name for name in runnable if name not in without]
    assert variants.preferred() == preferred


@needs_gcc
def test_all_are_compiled_where_the_compiler_knows_them() -> None:
    if int(subprocess.check_output(["gcc", "-dumpversion"]).split(b".")[0]) < 11:
        pytest.skip("this compiler does not know AMX")
    assert [path.stem for path in build(list(VARIANTS), BUILT, CACHE)] == list(VARIANTS)


@needs_gcc
def test_a_change_compiles_what_includes_it(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All six variants were compiled again, file after file."""

    def compiled(*names: str) -> tuple[int, int]:
        made = build(names, tmp_path / "made")
        assert [path.name for path in made] == [f"{name}.so" for name in names]
        # A new name each time: an object that is loaded is not loaded again.
        copy = shutil.copy(made[-1], tmp_path / f"{time.monotonic_ns()}.so")
        return count_of(capfd.readouterr().err), ctypes.CDLL(copy).two()

    assert compiled("avx2", "portable") == (8, 42)
    assert compiled("portable", "avx2") == (0, 42)
    (source / "alone.c").write_text("int alone(void) { return 8; }\n")
    assert compiled("portable") == (2, 42), "the file, and the one that knows the source"
    (source / "include" / "both.h").write_text("enum { BOTH = 60 };\n")
    assert compiled("portable") == (3, 62)
    (source / "include" / "both.h").write_text(SOURCES["include/both.h"])
    (source / "alone.c").write_text(SOURCES["alone.c"])
    os.utime(source / "one.c")
    assert compiled("portable") == (0, 42), "it is found by content"


@needs_gcc
def test_the_best_that_runs_is_installed(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One whose instructions the compiler does not know, or the kernel does not grant, makes room for the next."""
    made = tmp_path / "made"
    made.mkdir()
    (made / "_amx.cpython-311-x86_64-linux-gnu.so").touch()
    monkeypatch.delenv("WEFT_VARIANTS", raising=False)
    monkeypatch.setattr(variants, "preferred", lambda: ["amx", "avx512", "avx2"])
    granted = SOURCES["initialise.c"].replace("return 0", "return REFUSED")
    unknown = "#if defined(__AMX_INT8__)\n#error no such instructions\n#endif\n"
    refused = "#if defined(__AVX512F__)\nenum { REFUSED = 1 };\n#else\nenum { REFUSED };\n#endif\n"
    (source / "initialise.c").write_text(unknown + refused + granted)
    assert [path.name for path in install(made, "best")] == ["avx2.so"]
    assert [path.name for path in made.iterdir()] == ["avx2.so"]
    assert "amx left out" in capfd.readouterr().err
    monkeypatch.setattr(variants, "preferred", list)
    assert [path.name for path in install(made, "best")] == ["portable.so"]


@needs_gcc
def test_variants_are_chosen_by_hand(monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path) -> None:
    assert [path.stem for path in install(tmp_path, "all")] == list(VARIANTS)
    monkeypatch.setenv("WEFT_VARIANTS", "avx2,portable")
    assert [path.stem for path in install(tmp_path, "best")] == ["avx2", "portable"]
    monkeypatch.setenv("WEFT_VARIANTS", "all")
    assert [path.stem for path in install(tmp_path, "best")] == list(VARIANTS)
    monkeypatch.setenv("WEFT_VARIANTS", "avx2,sse9")
    with pytest.raises(SystemExit, match="no variant sse9; there are amx, avx512_bf16"):
        install(tmp_path, "all")


def test_without_a_compiler_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert install(tmp_path, "all") == []
    assert "apt install gcc libc6-dev" in capsys.readouterr().err


@needs_gcc
def test_what_is_not_used_leaves_the_cache(source: Path, tmp_path: Path) -> None:
    build(["portable"], tmp_path / "made")
    objects = sorted((tmp_path / "cache" / "weft" / "kernels").glob("*.o"))
    assert len(objects) == 4
    for file in objects:
        os.utime(file, (0, 0))
    (source / "one.c").unlink()
    build(["portable"], tmp_path / "made")
    left = sorted((tmp_path / "cache" / "weft" / "kernels").glob("*.o"))
    assert len(left) == 3
    assert len(set(objects) & set(left)) == 2
