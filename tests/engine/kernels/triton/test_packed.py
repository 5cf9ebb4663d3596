"""packed.py: its machine code for GPUs that are not here."""

from pathlib import Path
from typing import Any

import pytest

from tests.triton_compilation import ARCHITECTURES, compile_kernel, instructions, resources
from tests.triton_interpreter import needs_triton

PACKED = dict.fromkeys(("inputs", "outputs", "bias"), "*bf16") | {"codes": "*u8", "factors": "*fp32", "ends": "*i32"}
PACKED |= dict.fromkeys(("num_rows", "num_experts", "num_outs", "columns", "row_bytes", "num_groups", "group"), "i32")
PACKED |= {"input_stride": "i32", "output_stride": "i32"}
CONSTANTS = {"HAS_BIAS": True, "ADDS": False, "RUN": 32}
FEW = {"ROWS": 16, "OUTS": 32, "OCTETS": 128, "SLICES": 8}
MANY = {"ROWS": 64, "OUTS": 64, "OCTETS": 64, "SLICES": 1}

KINDS = {
    "int4": ({"KIND": "int4", "HAS_ZEROS": True, "EXPERTS": 0}, "*fp16"),
    "mxfp4 experts": ({"KIND": "fp4", "HAS_ZEROS": False, "EXPERTS": 128}, "*u8"),
    "fp8": ({"KIND": "fp8", "HAS_ZEROS": False, "EXPERTS": 0}, "*fp16"),
}

MOST_REGISTERS = {8: 128, 4: 200}
"""By the number of warps: two programs fit into the 65,536 registers of a multiprocessor."""


@needs_triton
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("sizes", "num_warps"), [(FEW, 8), (MANY, 4)], ids=["few", "many"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_unpack_in_registers(
    architecture: int, kind: str, sizes: dict[str, Any], num_warps: int, tmp_path: Path
) -> None:
    """Tiles of bytes and inputs go to shared memory while those before are multiplied, by matrix units.

    Inputs once did not here, but did on a GPU, where their number is known to be a multiple of 16.
    """
    from weft.engine.kernels.triton.products_jit import multiply_packed

    constants, scales = KINDS[kind]
    types = PACKED | {"scales": scales, "zeros": scales}
    constants = CONSTANTS | constants | sizes
    compiled = compile_kernel(multiply_packed, architecture, num_warps, types, constants, num_stages=4)
    used, code = resources(compiled, tmp_path), instructions(compiled, tmp_path)
    assert used["STACK"] == 0, "registers are spilled"
    assert used["REG"] <= MOST_REGISTERS[num_warps]
    assert any("MMA" in name for name in code)
    assert any(name.startswith("LDGSTS") for name in code)
    assert 20 << 10 < compiled.metadata.shared < 99 << 10, "less holds no inputs, and smaller GPUs have no more"


@needs_triton
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("has_ids", [False, True])
def test_rows_are_unpacked(architecture: int, has_ids: bool, tmp_path: Path) -> None:
    from weft.engine.kernels.triton.products_jit import unpack

    types = {name: kind for name, kind in PACKED.items() if name in unpack.arg_names}
    types |= {"scales": "*fp16", "zeros": "*fp16", "ids": "*i64", "first": "i32"}
    sizes = {"OUTS": 1 if has_ids else 16, "OCTETS": 256, "RUN": 32}
    constants = {"KIND": "int4", "HAS_ZEROS": True, "HAS_IDS": has_ids} | sizes
    compiled = compile_kernel(unpack, architecture, 4, types, constants)
    assert resources(compiled, tmp_path)["STACK"] == 0


@needs_triton
@pytest.mark.parametrize("architecture", [90, pytest.param(100, marks=pytest.mark.slow)])
def test_fp8_products_run_on_matrix_units_of_fp8(architecture: int, tmp_path: Path) -> None:
    from weft.engine.kernels.triton.products_jit import multiply_fp8, round_rows

    types = dict.fromkeys(("inputs", "weight"), "*fp8e4nv") | dict.fromkeys(("input_scales", "scales"), "*fp32")
    types |= {"bias": "*bf16", "outputs": "*bf16"} | dict.fromkeys(("num_rows", "num_outs", "size"), "i32")
    constants = {"HAS_BIAS": False, "ROWS": 64, "OUTS": 128, "GROUP": 128}
    compiled = compile_kernel(multiply_fp8, architecture, 8, types, constants, num_stages=4)
    assert any("QGMMA" in name or "UTCQMMA" in name for name in instructions(compiled, tmp_path))
    assert resources(compiled, tmp_path)["STACK"] == 0
    types = {"inputs": "*bf16", "outputs": "*fp8e4nv", "scales": "*fp32"}
    types |= dict.fromkeys(("size", "num_groups", "input_stride"), "i32")
    compiled = compile_kernel(round_rows, architecture, 16, types, {"BLOCK": 8192, "GROUP": 128})
    assert resources(compiled, tmp_path)["STACK"] == 0
