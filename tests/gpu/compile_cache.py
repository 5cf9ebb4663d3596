"""Compiles what the GPU tests and the benchmark launch, before they do: python -m tests.gpu.compile_cache

First their steps run on a GPU that is not there, which tells all variants of all kernels within seconds. Then as many
processes as there are cores compile those that the cache lacks. The cache is a folder that may be copied to another
machine with the same versions of Triton and Python: its name tells them, and the compute capability.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from tests.checkpoints import WIDE_CHECKPOINTS, Checkpoint
from tests.fake_gpu.driver import HOPPER, FakeDriver, Variant
from tests.fake_gpu.engines import start_warm, write_shape
from tests.fake_gpu.gpu import FakeGpu
from tests.fake_gpu.shapes import QWEN3_8B, QWEN3_600M
from tests.gpu.harness import GOLDEN_SIZES
from weft import server

ROOT = Path("build/triton")
DEMO = Path(server.__file__).parent / "demo_model"
SLOWEST = ("attend_kernel", "draw", "decide")
"""Kernels that take longest to compile, which begin first."""

_ENGINES: list[tuple[Checkpoint, dict[str, Any]]] = [
    (QWEN3_8B, {}),
    (QWEN3_8B, {"deterministic": True}),
    (QWEN3_600M, {}),
    *((c, {"dtype": dtype}) for c in WIDE_CHECKPOINTS.values() for dtype in ("bfloat16", "float16")),
    *((WIDE_CHECKPOINTS[n], {"dtype": "float32", "block_size": size}) for n, size in GOLDEN_SIZES),
    (WIDE_CHECKPOINTS["qwen3-wide"], {"dtype": "float32", "block_size": 32}),
    *(
        (WIDE_CHECKPOINTS[name], {"dtype": "bfloat16", "deterministic": True})
        for name in ("qwen3-wide", "mistral-wide")
    ),
]


def cache_folder(capability: int) -> Path:
    """Where the variants for a capability and the versions of this process are kept."""
    versions = f"triton-{metadata.version('triton')}-python-{platform.python_version()}"
    return (ROOT / f"{versions}-sm_{capability}").resolve()


def relocate(folder: Path) -> None:
    """Let the groups of a cache that was copied here name their files here: Triton writes whole paths."""
    for path in folder.glob("*/__grp__*"):
        files = json.loads(path.read_text())["child_paths"]
        here = {name: str(path.with_name(Path(file).name)) for name, file in files.items()}
        if here != files:
            path.write_text(json.dumps({"child_paths": here}))


def find_variants(capability: int) -> list[Variant]:
    """All variants that tests and benchmark launch, those first that take longest to compile."""
    variants: dict[tuple[str, str], Variant] = {}
    for record in (_record_engines, _record_checks):
        for variant in record(FakeGpu(capability, compiles=False)):
            variants[variant.name, variant.data] = variant
    return sorted(variants.values(), key=lambda variant: variant.name not in SLOWEST)


def _record_engines(gpu: FakeGpu) -> list[Variant]:
    with tempfile.TemporaryDirectory() as temporary:
        for number, (checkpoint, options) in enumerate(_ENGINES):
            start_warm(write_shape(checkpoint, Path(temporary) / str(number), 2), gpu, **options)
        for options in ({}, {"deterministic": True}):
            start_warm(DEMO, gpu, dtype="bfloat16", **options)
    return gpu.record.variants


def _record_checks(gpu: FakeGpu) -> list[Variant]:
    """The checks of tests/gpu/test_kernels.py, of which none can be right: nothing is computed."""
    from tests.engine.kernels.triton import attention_parity
    from tests.gpu import test_kernels

    def run(check: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(AssertionError, DynamicOutputShapeException):  # sizes that follow from values
            check(*arguments)

    with (
        gpu,
        patch.object(attention_parity.Harness, "check", lambda *_: None),
        patch.object(torch.testing, "assert_close", lambda *_, **__: None),
        patch.object(test_kernels, "run", run),
    ):
        for check, cases in test_kernels.ATTENTION:
            test_kernels.test_attention(check, cases)
        for dtype in test_kernels.DTYPES:
            test_kernels.test_layers(dtype)
        test_kernels.test_sampling()
    return gpu.record.variants


_to_compile: list[Variant] = []  # of the process that forks


def _compile(number: int) -> float:
    """Compile a variant into the cache; returns the seconds that it took."""
    began = time.perf_counter()
    variant = _to_compile[number]
    capability = json.loads(variant.data)["options"]["arch"]
    with FakeDriver(int(capability.removeprefix("sm"))).active():
        variant.function.preload(variant.data)
    return time.perf_counter() - began


def fill(variants: list[Variant], num_processes: int) -> list[float]:
    """Compile variants that the cache lacks, and load the others; returns the seconds of each."""
    _to_compile[:] = variants
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        return pool.map(_compile, range(len(variants)), chunksize=1)


@contextlib.contextmanager
def using(folder: Path) -> Iterator[None]:
    """Let Triton keep what it compiles in a folder, and no more of it than it launches."""
    settings = {"TRITON_CACHE_DIR": str(folder), "TRITON_STORE_BINARY_ONLY": "1"}
    fusion = {"TRITON_DEFAULT_FP_FUSION": "1"}  # as the engine and `make gpu` set it: a part of Triton's keys
    with patch.dict(os.environ, settings | fusion):
        yield


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser("python -m tests.gpu.compile_cache", description=__doc__)
    parser.add_argument("--capability", type=int, help="90 for 9.0 (default: the GPU's, else 90)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one for each core")
    parser.add_argument("--print-folder", action="store_true", help="print where the cache is, and do nothing else")
    options = parser.parse_args()
    capability = options.capability
    if capability is None:
        major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else divmod(HOPPER, 10)
        capability = 10 * major + minor
    folder = cache_folder(capability)
    if options.print_folder:
        print(folder)
        return
    began = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    relocate(folder)
    with using(folder):
        variants = find_variants(capability)
        found_s = time.perf_counter() - began
        seconds = fill(variants, options.processes)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    total = time.perf_counter() - began
    print(f"{len(variants)} kernels found in {found_s:.0f} s, compiled in {sum(seconds):.0f} s of {options.processes}")
    print(f"processes, {total:.0f} s in all; {folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
