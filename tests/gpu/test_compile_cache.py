import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_cache_that_was_moved_is_used(tmp_path: Path) -> None:
    """Filled by other processes from what a GPU that is not there was asked for."""
    from tests.fake_gpu.gpu import FakeGpu
    from tests.gpu.compile_cache import fill, relocate, using
    from weft.engine.kernels.triton.layer_kernels import TritonKernels

    def launch(gpu: FakeGpu) -> None:
        with gpu:
            weight = torch.ones(64, dtype=torch.bfloat16, device="cuda")
            TritonKernels().norm(weight, 1e-6)(torch.ones(2, 64, dtype=torch.bfloat16, device="cuda"))

    launch(recorded := FakeGpu(compiles=False))
    there, here = tmp_path / "there", tmp_path / "here"
    with using(there):
        assert len(fill(recorded.record.variants, 2)) == 1
    shutil.move(there, here)
    before = files(here)
    assert sum(name.endswith(".cubin") for name in before) == 1
    assert sum(name.endswith((".ptx", ".ttir")) for name in before) == 0
    relocate(here)
    assert (moved := files(here)).keys() == before.keys()
    with using(here):
        launch(FakeGpu())
    assert files(here) == moved
