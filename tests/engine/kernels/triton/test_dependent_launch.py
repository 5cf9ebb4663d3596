"""Every kernel that starts early waits before it touches what another kernel writes or reads."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.triton_compilation import compile_kernel, instructions
from tests.triton_interpreter import needs_triton

MEMORY = ("LDG", "STG", "RED", "ATOM", "LDGSTS", "EXIT")

Kernel = tuple[Any, int, dict[str, str], dict[str, Any], int]


def kernels() -> dict[str, Kernel]:
    """Kernels with number of warps, types, constants, and how many loads of norm weights come first."""
    from weft.engine.kernels.triton import attention_jit as attention_kernels
    from weft.engine.kernels.triton import layers_jit as layer_kernels

    numbers = dict.fromkeys(("size", "row_stride", "token_stride", "query_stride"), "i32") | {"eps": "fp32"}
    tensors = dict.fromkeys(("hidden", "weight", "outputs", "qkv", "rotation", "cache", "gate_up", "queries"), "*bf16")
    tensors |= dict.fromkeys(("slots", "metadata", "items", "merges"), "*i32")
    types = numbers | tensors | dict.fromkeys(("partials", "partial_sums", "slopes", "sinks", "scales"), "*fp32")
    heads = {"HAS_NORM": True, "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "HEADS": 16}
    sizes = {"HEAD_DIM": 128, "PADDED_DIM": 128}
    attend = {"SCALE": 0.1, "SOFT_CAP": 0.0, "NUM_KV_HEADS": 8, "NUM_SHARED": 4, "BLOCK_SIZE": 16, "WINDOW": 0}
    attend |= {"TILE_ROWS": 16, "TILE_KEYS": 64, "IS_UNIFORM": True, **sizes}
    attend |= {"SPAN": 0, "HAS_SLOPES": True, "HAS_SINKS": True}
    merge = {"NUM_HEADS": 32, "TILE_PARTS": 16, "HAS_SINKS": True, **sizes}
    return {
        "rms_norm": (layer_kernels.rms_norm, 8, types, {"BLOCK": 4096}, 2),
        "prepare_heads": (layer_kernels.prepare_heads, 4, types, heads | {"PAIRS": 64}, 2),
        "activate": (layer_kernels.activate, 4, types, {"ACTIVATION": "silu", "BLOCK": 1024}, 0),
        "attend": (attention_kernels.attend_kernel, 4, types, attend, 0),
        "merge": (attention_kernels.merge_kernel, 4, types, merge, 0),
    }


def compiled(name: str, is_dependent: bool) -> tuple[Any, int]:
    kernel, num_warps, types, constants, num_loads = kernels()[name]
    types = {argument: kind for argument, kind in types.items() if argument in kernel.arg_names}
    return compile_kernel(kernel, 90, num_warps, types, constants | {"IS_DEPENDENT": is_dependent}), num_loads


@needs_triton
@pytest.mark.parametrize("name", ["rms_norm", "prepare_heads", "activate", "attend", "merge"])
def test_only_weights_are_loaded_before_the_wait(name: str, tmp_path: Path) -> None:
    """A program that ended before it waited would let its successor run beside the kernels before it."""
    kernel, num_loads = compiled(name, True)
    code = instructions(kernel, tmp_path)
    wait = code.index("ACQBULK")
    assert "PREEXIT" in code[:wait]
    touched = [instruction for instruction in code[:wait] if instruction.startswith(MEMORY)]
    assert len(touched) == num_loads
    assert all(instruction.startswith("LDG") for instruction in touched)
    assert kernel.metadata.launch_pdl
    assert not any(instruction.startswith("BRA") for instruction in code[:wait]), "a way around the wait"


@needs_triton
def test_without_the_flag_a_kernel_does_not_wait() -> None:
    kernel, _ = compiled("rms_norm", False)
    assert "griddepcontrol" not in kernel.asm["ptx"]
    assert not kernel.metadata.launch_pdl


@needs_triton
def test_options_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.engine.kernels.triton.layers_jit import launch_options, supports_dependent_launch

    assert launch_options(True) == {"IS_DEPENDENT": True, "launch_pdl": True}
    assert launch_options(False) == {"IS_DEPENDENT": False}
    assert not supports_dependent_launch(torch.device("cpu"))
    for capability, is_supported in (((8, 9), False), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, answer=capability: answer)
        assert supports_dependent_launch(torch.device("cuda")) == is_supported
