"""Compiles the attention kernels for GPUs that are not here, and reads what the machine code needs."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.engine.kernels.triton.attention_tiles import Gpu, Tile, padded

GPUS = {
    80: Gpu((8, 0), 108, 163 << 10),
    86: Gpu((8, 6), 84, 99 << 10),
    90: Gpu((9, 0), 132, 227 << 10),
    100: Gpu((10, 0), 148, 227 << 10),
}
VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

# Of a multiprocessor: registers, and the shared memory that it keeps of each program.
_NUM_REGISTERS = 65536
_RESERVED_BYTES = 1 << 10


@dataclass(frozen=True)
class MachineCode:
    """What a program needs: registers of a thread, bytes of local memory of a thread (spills), and shared memory."""

    num_warps: int
    num_registers: int
    local_bytes: int
    shared_bytes: int

    def programs(self, gpu: Gpu) -> int:
        """How many share a multiprocessor."""
        by_registers = _NUM_REGISTERS // (self.num_warps * 32 * -(-self.num_registers // 8) * 8)
        by_memory = (gpu.shared_bytes + _RESERVED_BYTES) // (self.shared_bytes + _RESERVED_BYTES)
        return min(by_registers, by_memory)


def machine_code(compiled: Any, folder: Path) -> MachineCode:
    """Read a compiled kernel by the tool that Triton bundles."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    printed = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    num_registers, stack, local = (int(re.findall(rf"{name}:(\d+)", printed)[0]) for name in ("REG", "STACK", "LOCAL"))
    return MachineCode(compiled.metadata.num_warps, num_registers, stack + local, compiled.metadata.shared)


def compile_for(
    capability: int, kernel: Any, tensors: dict[str, str], numbers: list[str], constants: dict[str, Any], **options: int
) -> Any:
    """Compile a kernel with tensors of these types, int32 numbers that are multiples of 16, and these constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: f"*{dtype}" for name, dtype in tensors.items()} | dict.fromkeys(numbers, "i32")
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in types}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=options | {"enable_fp_fusion": True}
    )


def compile_attend_latents(capability: int, num_heads: int, dtype: str, tile: Tile) -> Any:
    """For the latents of DeepSeek V2 and V3."""
    from weft.engine.kernels.triton.attention_jit import attend_latents_kernel

    sizes = {"LATENT_DIM": 512, "ROTARY_DIM": 64, "PADDED_LATENT": 512, "PADDED_ROTARY": 64, "BLOCK_SIZE": 16}
    constants = {
        "SCALE": 0.1,
        "NUM_HEADS": num_heads,
        "NUM_TILES": -(-num_heads // tile.rows),
        "TILE_ROWS": tile.rows,
        "TILE_KEYS": tile.keys,
        "IS_DEPENDENT": False,
        **sizes,
    }
    tensors = dict.fromkeys(("queries", "outputs", "cache"), dtype) | dict.fromkeys(("metadata", "items"), "i32")
    tensors |= dict.fromkeys(("partials", "partial_sums"), "fp32")
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return compile_for(capability, attend_latents_kernel, tensors, ["query_stride"], constants, **options)


def compile_attend(
    capability: int,
    head_dim: int,
    dtype: str,
    cache_dtype: str,
    tile: Tile,
    *,
    is_uniform: bool,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Any:
    from weft.engine.kernels.triton.attention_jit import attend_kernel

    integers = dict.fromkeys(("metadata", "items"), "i32")
    floats = dict.fromkeys(("partials", "partial_sums", "slopes", "sinks", "scales"), "fp32")
    constants = {
        "SCALE": 0.1,
        "SOFT_CAP": soft_cap,
        "NUM_KV_HEADS": 8,
        "NUM_SHARED": 4,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "WINDOW": window,
        "SPAN": 0,
        "HAS_SLOPES": False,
        "HAS_SINKS": False,
        "PADDED_DIM": padded(head_dim),
        "TILE_ROWS": tile.rows,
        "TILE_KEYS": tile.keys,
        "IS_UNIFORM": is_uniform,
        "IS_DEPENDENT": False,
    }
    tensors = {"queries": dtype, "outputs": dtype, "cache": cache_dtype, **integers, **floats}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return compile_for(capability, attend_kernel, tensors, ["query_stride"], constants, **options)
