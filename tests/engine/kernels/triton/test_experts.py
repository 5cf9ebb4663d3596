"""experts.py: its machine code for GPUs that are not here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.triton_compilation import ARCHITECTURES, compile_kernel, instructions, resources
from tests.triton_interpreter import needs_triton

TENSORS = dict.fromkeys(("inputs", "weight", "bias", "outputs"), "*bf16")


@needs_triton
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("rows", "num_warps"), [(16, 4), (64, 8)])
def test_the_product_runs_on_matrix_units(architecture: int, rows: int, num_warps: int, tmp_path: Path) -> None:
    from weft.engine.kernels.triton.products_jit import multiply_groups

    types = TENSORS | {"ends": "*i32"} | dict.fromkeys(("num_experts", "num_outs", "columns"), "i32")
    constants = {"HAS_BIAS": True, "EXPERTS": 128, "ROWS": rows, "OUTS": 64, "BLOCK": 64}
    compiled = compile_kernel(multiply_groups, architecture, num_warps, types, constants)
    code = instructions(compiled, tmp_path)
    assert any("MMA" in name for name in code)
    assert resources(compiled, tmp_path)["STACK"] == 0, "registers are spilled"


@needs_triton
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_sum_over_experts_compiles(architecture: int, tmp_path: Path) -> None:
    from weft.engine.kernels.triton.products_jit import mix

    types = {"outputs": "*bf16", "places": "*i64", "shares": "*fp32", "residual": "*bf16"}
    types |= {"size": "i32", "residual_stride": "i32"}
    compiled = compile_kernel(mix, architecture, 4, types, {"CHOSEN": 8, "BLOCK": 1024})
    assert resources(compiled, tmp_path)["STACK"] == 0


@needs_triton
@pytest.mark.parametrize(
    ("capability", "is_taken"), [((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_torch_s_product_is_taken_where_it_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_taken: bool
) -> None:
    """It was for every later GPU, whose steps could then not be recorded."""
    from weft.engine.kernels.triton.products import supports_grouped

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    weight: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, size=lambda dim: 64, device=torch.device("cuda"))
    assert supports_grouped(weight) == is_taken
