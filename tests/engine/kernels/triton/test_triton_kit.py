from pathlib import Path

import pytest

from tests.triton_compilation import ARCHITECTURES, compile_kernel
from tests.triton_interpreter import needs_triton, run_interpreted


@needs_triton
def test_parity_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_layers.py"))


@needs_triton
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile(architecture: int) -> None:
    from weft.engine.kernels.triton import layer_kernels as kernels

    for value, weight in (("*bf16", "*bf16"), ("*fp16", "*fp16"), ("*fp32", "*fp32"), ("*bf16", "*fp32")):
        types = {"hidden": value, "weight": weight, "outputs": value, "size": "i32", "row_stride": "i32", "eps": "fp32"}
        compile_kernel(kernels.rms_norm, architecture, 8, types, {"BLOCK": 4096, "IS_DEPENDENT": False})
    types = {"qkv": "*bf16", "rotation": "*bf16", "weight": "*bf16", "slots": "*i32", "eps": "fp32"}
    types["token_stride"] = "i32"
    for has_norm, block_size, cache in (
        (True, 32, "*bf16"),
        (True, 32, "*fp8e4nv"),
        (False, 16, "*bf16"),
        (True, 0, "*bf16"),
    ):
        if architecture < 89 and cache == "*fp8e4nv":
            continue
        sizes = {"HAS_NORM": has_norm, "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": block_size}
        sizes |= {"HEADS": 16, "PAIRS": 64, "IS_DEPENDENT": False}
        compile_kernel(kernels.prepare_heads, architecture, 4, types | {"cache": cache}, sizes)
    types = {"gate_up": "*bf16", "outputs": "*bf16", "size": "i32"}
    for activation in ("silu", "gelu", "gelu_pytorch_tanh"):
        constants = {"ACTIVATION": activation, "BLOCK": 1024, "IS_DEPENDENT": False}
        compile_kernel(kernels.activate, architecture, 4, types, constants)
