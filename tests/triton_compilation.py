"""Compiles Triton kernels for GPUs that are not there."""

from typing import Any

import pytest

ARCHITECTURES = (pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow))


def compile_kernel(
    kernel: Any, architecture: int, num_warps: int, types: dict[str, str], constants: dict[str, Any]
) -> None:
    """Compile a kernel down to machine code.

    Args:
        kernel: A function under `triton.jit`.
        architecture: Compute capability, 90 for 9.0.
        types: Of its arguments, as Triton spells them: "*bf16", "i32".
        constants: Values of those that are constexpr.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    kinds = types | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(kernel, {name: kinds[name] for name in kernel.arg_names}, constants)
    compiled = triton.compile(
        source, GPUTarget("cuda", architecture, 32), {"num_warps": num_warps, "enable_fp_fusion": True}
    )
    assert compiled.asm["cubin"]
