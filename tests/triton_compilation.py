"""Compiles Triton kernels for GPUs that are not there."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ARCHITECTURES = (pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow))

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)")


def compile_kernel(
    kernel: Any, architecture: int, num_warps: int, types: dict[str, str], constants: dict[str, Any], **options: Any
) -> Any:
    """Compile a kernel down to machine code.

    Args:
        kernel: A function under `triton.jit`.
        architecture: Compute capability, 90 for 9.0.
        types: Of its arguments, as Triton spells them: "*bf16", "i32". Pointers, strides and sizes are multiples of 16.
        constants: Values of those that are constexpr.
        options: Further options of a launch.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    kinds, names = types | dict.fromkeys(constants, "constexpr"), kernel.arg_names
    sizes = ("stride", "size", "row_bytes", "columns")
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name.endswith(sizes)]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = triton.compiler.ASTSource(kernel, {name: kinds[name] for name in names}, constants, attributes)
    compiled = triton.compile(
        source,
        GPUTarget("cuda", architecture, 32),
        {"num_warps": num_warps, "enable_fp_fusion": True, "launch_pdl": constants.get("IS_DEPENDENT", False)}
        | options,
    )
    assert compiled.asm["cubin"]
    return compiled


def instructions(compiled: Any, folder: Path) -> list[str]:
    """The names of the machine instructions of a compiled kernel, in order, such as LDG.E.128."""
    listing = _run_tool("nvdisasm", "-c", compiled, folder)
    return [match[1] for match in map(_INSTRUCTION.search, listing.splitlines()) if match]


def resources(compiled: Any, folder: Path) -> dict[str, int]:
    """What a compiled kernel uses: REG of a thread, bytes on its STACK, which is where registers spill, and more."""
    usage = _run_tool("cuobjdump", "--dump-resource-usage", compiled, folder)
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", usage)}


def _run_tool(tool: str, option: str, compiled: Any, folder: Path) -> str:
    import triton

    code = folder / "kernel.cubin"
    code.write_bytes(compiled.asm["cubin"])
    command = [Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool, option, code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
