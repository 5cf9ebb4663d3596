"""Machine code of every kernel that the engine launches for models of real shapes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.checkpoints import Checkpoint
from tests.fake_gpu.driver import HOPPER, Variant
from tests.fake_gpu.engines import Warm
from tests.fake_gpu.expectations import MOST_INSTRUCTIONS_PER_BYTE, claims, expected_of, instructions_per_byte
from tests.fake_gpu.gpu import FakeGpu
from tests.fake_gpu.machine_code import MachineCode, read
from tests.fake_gpu.shapes import GEMMA2_2B, QWEN3_8B

_COLUMNS = "{:<16}{:>6}{:>6}{:>9}{:>10}{:>14}{:>8}{:>13}{:>7}"
_TITLES = ("kernel", "warps", "regs", "shared", "programs", "instructions", "bytes", "instr./byte", "limit")


def show(code: MachineCode, variant: Variant) -> None:
    """A line of the roofline: programs a multiprocessor, instructions of all warps, and how near that is to a limit."""
    expected, about_bytes = expected_of(variant), ["", "", ""]
    rate = instructions_per_byte(expected, variant, code)
    if expected.num_bytes is not None and rate is not None:
        num_bytes = expected.num_bytes(variant.constants)
        about_bytes = [f"{num_bytes:,}", f"{rate:.3f}", f"{rate / MOST_INSTRUCTIONS_PER_BYTE:.0%}"]
    sizes = (code.num_warps, code.registers, code.shared_bytes, code.num_programs, len(code.loop) * code.num_warps)
    print(_COLUMNS.format(variant.name, *sizes, *about_bytes))


def check(variants: Sequence[Variant]) -> None:
    """Compare with the table of expectations."""
    print("\n" + _COLUMNS.format(*_TITLES))
    faults = []
    for variant in variants:
        code = read(variant)
        show(code, variant)
        found = claims(expected_of(variant), variant, code)
        faults += [f"{variant}: not so: it {claim}" for claim, is_so in found.items() if not is_so]
    assert faults == []


def test_kernels_of_qwen3_8b(qwen3_8b: Warm) -> None:
    check(qwen3_8b.gpu.record.variants)


@pytest.mark.parametrize(
    ("checkpoint", "options"),
    [
        pytest.param(GEMMA2_2B, {}, id="gemma2-2b", marks=pytest.mark.slow),
        pytest.param(QWEN3_8B, {"deterministic": True}, id="deterministic", marks=pytest.mark.slow),
    ],
)
def test_kernels_of_other_models(
    start_on_gpu: Callable[..., Warm], checkpoint: Checkpoint, options: dict[str, Any]
) -> None:
    """One with windows, soft caps, wide heads and another activation; and the tile of deterministic steps."""
    check(start_on_gpu(checkpoint, 2, gpu=FakeGpu(), **options).gpu.record.variants)


MATRIX = {80: "HMMA", 86: "HMMA", HOPPER: "HGMMA", 100: "UTCHMMA"}
"""Capability -> instructions that multiply matrices of prompts."""

_GELU = dataclasses.replace(QWEN3_8B, changes={**QWEN3_8B.changes, "hidden_act": "gelu", "head_dim": 64})
_ODD_HEADS = dataclasses.replace(QWEN3_8B, changes={**QWEN3_8B.changes, "head_dim": 80})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", list(MATRIX))
@pytest.mark.parametrize(
    ("checkpoint", "options", "most_local_bytes"),
    [
        (QWEN3_8B, {}, 0),
        (QWEN3_8B, {"deterministic": True}, 32),
        (QWEN3_8B, {"kv_cache_dtype": "fp8", "dtype": "float16"}, 16),
        (QWEN3_8B, {"dtype": "float32"}, 1024),
        (GEMMA2_2B, {}, 64),
        (_GELU, {}, 0),
        (_ODD_HEADS, {}, 0),
    ],
    ids=["qwen3-8b", "deterministic", "fp8", "float32", "gemma2-2b", "gelu", "heads-of-80"],
)
def test_kernels_of_other_gpus(
    start_on_gpu: Callable[..., Warm],
    checkpoint: Checkpoint,
    options: dict[str, Any],
    most_local_bytes: int,
    capability: int,
) -> None:
    """They compile, have the shared memory that they need, and use the units that multiply matrices."""
    if "kv_cache_dtype" in options and capability < 89:
        pytest.skip("fp8 caches need capability 8.9")
    warm = start_on_gpu(checkpoint, 2, gpu=FakeGpu(capability), **options)
    for variant in warm.gpu.record.variants:
        code = read(variant)
        assert code.local_bytes <= most_local_bytes, variant
        if variant.name == "attend_kernel" and "dtype" not in options and not variant.constants["IS_UNIFORM"]:
            assert code.count(MATRIX[capability]), variant


@triton.jit
def spilling(values, num_passes, SIZE: tl.constexpr):
    at = values + tl.arange(0, SIZE)
    kept, sums = tl.load(at), tl.load(at + SIZE)
    for index in range(num_passes):
        sums = sums * tl.load(at + index * SIZE) + kept
    tl.store(at, sums)


def test_local_memory_and_loops_are_seen() -> None:
    with FakeGpu() as gpu:
        spilling[(1,)](torch.empty(1 << 13, device="cuda"), 100, 1 << 12, num_warps=1)
    code = read(gpu.record.variants[0])
    assert code.local_bytes > 0
    assert code.count("STL") > 0
    assert 0 < len(code.loop) < len(code.instructions)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "num_programs"),
    [(108, 104_448, 4, 2), (211, 131_072, 8, 1), (128, 0, 8, 2), (129, 0, 8, 1), (32, 0, 4, 16), (40, 0, 4, 12)],
)
def test_programs_share_registers_memory_and_threads(
    registers: int, shared_bytes: int, num_warps: int, num_programs: int
) -> None:
    assert MachineCode(registers, 0, shared_bytes, num_warps, (), range(0)).num_programs == num_programs
