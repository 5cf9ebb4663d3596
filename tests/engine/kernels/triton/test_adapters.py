"""adapters.py: its machine code for GPUs that are not here."""

from pathlib import Path

import pytest

from tests.triton_compilation import ARCHITECTURES, compile_kernel, instructions, resources
from tests.triton_interpreter import needs_triton

SHAPE = {"DELTAS": 3, "RANK": 512, "ROWS": 16, "RANKS": 64}
"""Of the largest rank, which once took more registers and shared memory than there are."""


@needs_triton
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["shrink", "expand"])
def test_the_products_run_on_matrix_units(architecture: int, name: str, tmp_path: Path) -> None:
    from weft.engine.kernels.triton import products_jit as kernels

    types = dict.fromkeys(("order", "pieces"), "*i64") | dict.fromkeys(("weight", "sums"), "*bf16")
    if name == "shrink":
        types |= {"inputs": "*bf16", "columns": "i32", "input_stride": "i32"}
        compiled = compile_kernel(kernels.shrink, architecture, 4, types, SHAPE | {"BLOCK": 64})
    else:
        types |= {"owners": "*i32", "outputs": "*bf16", "num_outs": "i32", "output_stride": "i32"}
        compiled = compile_kernel(kernels.expand, architecture, 4, types, SHAPE | {"OUTS": 64})
    assert any("MMA" in code for code in instructions(compiled, tmp_path))
    assert resources(compiled, tmp_path)["STACK"] == 0, "registers are spilled"
    assert compiled.metadata.shared < 99 << 10, "smaller GPUs have 99 KiB of shared memory"
